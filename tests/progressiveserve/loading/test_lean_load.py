"""Staged checkpoints into lean layers: loads, views, adapters and fused layers are what they are on stock ones."""

from __future__ import annotations

import pytest
import torch
from loads import ALL, Loads

from firsttoken.assets.text_tokenizer import read_text_tokenizer
from firsttoken.engine.accelerator import build_model
from firsttoken.engine.lora import LoraLinear
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.study.errors import ModelError
from firsttoken.study.system.compiled import NONE, accelerator_name
from firsttoken_cpu.fused import FusedLayer, fuse_layer
from firsttoken_cpu.lean.lean_model import LeanModel
from firsttoken_cpu.native.library import kernels

needs_lean = pytest.mark.skipif(accelerator_name() == NONE, reason="nothing starts lean where torch is alone")
IDS = torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(2))


class LeanLoads(Loads):
    """The same loads into a lean model."""

    def __init__(self, staged) -> None:
        super().__init__(staged)
        self.meta_model = MetaModel(staged.folder, self.manifest, build=build_model)
        assert type(self.meta_model.model) is LeanModel
        self.model, self.view = self.meta_model.model, self.meta_model.empty_view()


@needs_lean
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_stage_says_what_the_stock_layers_say(stage, kind, tied):
    """Bit for bit, adapters included, and the passed layers are gaps."""
    staged = stage(kind=kind, tied=tied, adapters=(1, 2))
    lean, stock = LeanLoads(staged), Loads(staged)
    for number in ALL:
        view = lean.bring(number)
        stock.bring(number)
        assert torch.equal(lean.answer(IDS), stock.answer(IDS))
        adapted = any(isinstance(module, LoraLinear) for layer in view.layers for module in layer.modules())
        assert adapted == (number < 3) and any(isinstance(layer, PassLayer) for layer in view.layers) == (number < 3)


@needs_lean
def test_a_prefill_that_streams_behind_the_layers(stage):
    staged = stage()
    lean = LeanLoads(staged)
    load = lean.begin(*ALL)
    with load.streaming():
        answer = lean.answer(IDS, load.view)
    load.wait()
    stock = Loads(staged)
    stock.bring(*ALL)
    assert torch.equal(answer, stock.answer(IDS))


@torch.inference_mode()
def test_layers_fuse_as_they_arrive(stage):
    if kernels() is None or not torch.backends.mkldnn.is_available():
        pytest.skip("no C++ compiler or no oneDNN here: nothing is fused")
    lean = LeanLoads(stage())
    view = lean.bring(*ALL)
    plain = lean.answer(IDS)
    for i, layer in enumerate(view.layers):
        view.layers[i] = fuse_layer(layer)
        assert type(view.layers[i]) is FusedLayer
    torch.testing.assert_close(lean.answer(IDS), plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}', "\ud800"])
def test_a_tokenizer_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"tokenizer\.json.*; copy the model's own") as caught:
        read_text_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
