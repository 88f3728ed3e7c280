"""Staged checkpoints into lean layers: loads, views, adapters and fused layers are what they are on stock ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loads import ALL, Loads

from firsttoken.assets.text_tokenizer import read_text_tokenizer
from firsttoken.engine.accelerator import build_model
from firsttoken.engine.lora import LoraLinear
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.study.errors import ModelError
from firsttoken.study.system.compiled import NONE, accelerator_name
from firsttoken_cpu.fused import FusedLayer, fuse_layer
from firsttoken_cpu.lean.lean_model import LeanModel
from firsttoken_cpu.native.library import kernels

IDS = torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(2))


class LeanLoads(Loads):
    """The same loads into a lean model."""

    def __init__(self, staged) -> None:
        super().__init__(staged)
        self.meta_model = MetaModel(staged.folder, self.manifest, build=build_model)
        assert type(self.meta_model.model) is LeanModel
        self.model, self.view = self.meta_model.model, self.meta_model.empty_view()


@pytest.mark.skipif(accelerator_name() == NONE, reason="nothing starts lean where torch is alone")
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


@torch.inference_mode()
def test_a_prefill_that_streams_behind_the_layers(stage):
    staged = stage()
    meta_model = MetaModel(staged.folder, staged.manifest, build=build_model)
    load = StageLoad(staged.folder, staged.manifest, ALL, [Link()], meta_model, meta_model.empty_view())
    load.view.activate(meta_model.model)
    with load.streaming():
        answer = meta_model.model(IDS).logits
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


def test_a_tensor_that_is_missing_or_has_another_shape(stage):
    """Held against the lean model's own names and shapes before anything is read."""
    staged, name = stage(), "model.layers.0.mlp.up_proj.weight"
    manifest = read_manifest(staged.folder)
    first = manifest.stages[0]
    layer = first.parts[1]

    def with_tensors(tensors):
        parts = (first.parts[0], replace(layer, tensors=tensors), *first.parts[2:])
        return replace(manifest, stages=(replace(first, parts=parts), *manifest.stages[1:]))

    lacking = with_tensors({key: entry for key, entry in layer.tensors.items() if key != name})
    with pytest.raises(ModelError, match=r"does not stage the model of its config\.json: .*up_proj"):
        MetaModel(staged.folder, lacking, build=build_model)
    turned = with_tensors(layer.tensors | {name: replace(layer.tensors[name], shape=layer.tensors[name].shape[::-1])})
    with pytest.raises(ModelError, match=r"layer 00 brings model\.layers\.0\.mlp\.up_proj\.weight as \[32, 64\]"):
        MetaModel(staged.folder, turned, build=build_model)


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}', "\ud800"])
def test_a_tokenizer_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"tokenizer\.json.*; copy the model's own") as caught:
        read_text_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
