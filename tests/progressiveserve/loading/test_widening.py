"""A bf16 checkpoint computes in float32 where the processor asks for it: the stored weights, exactly, only wider."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from loads import ALL, Loads
from transformers import AutoModelForCausalLM
from waiting import wait_stage

from firsttoken.assets.models import as_stored
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.loading.host_memory import WeightMemoryBlock
from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.study import dtypes

BF16, FP32 = torch.bfloat16, torch.float32


@torch.inference_mode()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_arrives_in_bf16_computes_as_stock_transformers_does_in_fp32(stage, ids, tied: bool) -> None:
    staged = stage("llama", tied, BF16)
    loads = Loads(staged, dtype=FP32)
    loads.bring(*ALL)
    assert {parameter.dtype for parameter in loads.model.parameters()} == {FP32}
    stock = AutoModelForCausalLM.from_pretrained(staged.folder, dtype=FP32).eval()
    assert torch.equal(loads.answer(ids), logits(stock, ids))
    rounded = AutoModelForCausalLM.from_pretrained(staged.folder, dtype=BF16).eval()
    assert not torch.equal(logits(rounded, ids).float(), logits(stock, ids)), "or this test shows nothing"


def test_the_memory_of_a_layer_is_not_kept_until_the_others_are_there(stage, monkeypatch) -> None:
    """Layers are fused as they come, and let their weights go."""
    make, back, backed, begun = WeightBuilder._make, WeightBuilder._back, threading.Event(), threading.Event()
    rooms: list[weakref.ref[WeightMemoryBlock]] = []
    kept: list[int] = []

    def noted(builder, index, part, room):
        assert backed.wait(60) and begun.wait(60)  # until then who began it may have them
        kept.append(sum(ref() is not None for ref in rooms))
        rooms.append(weakref.ref(room))
        return make(builder, index, part, room)

    monkeypatch.setattr(WeightBuilder, "_make", noted)
    monkeypatch.setattr(WeightBuilder, "_back", lambda builder, rooms: (back(builder, rooms), backed.set()))
    load = Loads(stage("llama", True, BF16), dtype=FP32).begin(*ALL)
    begun.set()
    load.wait()
    assert kept == [0] * len(kept) and len(kept) > 3


@pytest.mark.parametrize(("fast", "dtype"), [(True, BF16), (False, FP32)])
def test_a_service_computes_in_what_its_processor_is_fast_at(stage, monkeypatch, fast: bool, dtype) -> None:
    monkeypatch.setattr(dtypes, "cpu_rates", lambda: dtypes.ProductRates(fast, 100.0, 200.0 if fast else 1.0))
    server = StagedServer(stage("llama", True, BF16).folder, [Link()], dtype=dtypes.AUTO)
    server.start()
    try:
        assert wait_stage(server, 3, 60)
        assert {parameter.dtype for parameter in server._loader.meta_model.model.parameters()} == {dtype}
        assert len(list(server.submit([5, 6, 7], 3).events())) == 3
    finally:
        server.close()


def test_the_served_weights_are_the_same_numbers_whatever_computes(make_model) -> None:
    wide, narrow = as_stored(make_model(), BF16, FP32), as_stored(make_model(), BF16, BF16)
    untouched = make_model()
    pairs = zip(wide.parameters(), narrow.parameters(), untouched.parameters(), strict=True)
    changed = [(torch.equal(a, b.float()), torch.equal(a, c)) for a, b, c in pairs]
    assert all(same for same, _ in changed) and not all(exact for _, exact in changed)
    rotary = [model.model.rotary_emb.inv_freq for model in (wide, untouched)]
    assert rotary[0].dtype == FP32 and torch.equal(*rotary), "no file holds the rotary tables, so none rounds them"


def test_what_is_staged_is_what_was_rounded(make_model) -> None:
    model = as_stored(make_model(), BF16, FP32)
    source = ModelSource(model, None, Origin("tiny", "5e12" * 16, "real"), BF16)
    name, parameter = next(iter(model.named_parameters()))
    assert source.dtype(name) == source.get(name).dtype == source.config.dtype == BF16
    assert torch.equal(source.get(name).float(), parameter)
