"""Loads of one stage or several: the right model, layer by layer, beside the stage before."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from coarse_plans import coarse_first
from loads import ALL, Held, Loads, stock_answer
from transformers import AutoModelForCausalLM

from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.base_model import at_stage
from firsttoken.progressiveserve.checkpoint.names import torch_dtype
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Stage, by_layers, single_stage
from firsttoken.progressiveserve.loading import loader
from firsttoken.progressiveserve.loading.read_plan import open_reader, parts_of
from firsttoken.progressiveserve.loading.views import changed
from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder
from firsttoken.progressiveserve.passlayer import PassLayer

# what is loaded


@pytest.mark.parametrize("links", [1, 3])
@pytest.mark.parametrize(
    ("kind", "tied", "dtype"),
    [("llama", True, torch.float32), ("qwen2", False, torch.bfloat16), ("llama", False, torch.bfloat16)],
    ids=["llama", "qwen2", "llama-untied"],
)
def test_the_whole_model_streamed_is_the_stock_one(stage, ids, kind, tied, dtype, links):
    staged = stage(kind, tied, dtype)
    loads = Loads(staged, links)
    load = loads.begin(*ALL)
    with load.streaming():
        streamed = loads.answer(ids, load.view)
    assert load.wait() is load.view and load.arrived
    expected = stock_answer(staged.folder, ids)
    assert torch.equal(streamed, expected) and torch.equal(loads.answer(ids, load.view), expected)
    assert sum(link.bytes_moved for link in loads.links) == staged.manifest.bytes
    assert all(link.bytes_moved for link in loads.links)
    assert (loads.model.lm_head.weight is loads.model.model.embed_tokens.weight) == tied
    assert not any(parameter.is_meta for parameter in loads.model.parameters())


def test_a_reader_that_began_before_the_model_was_there(stage, ids):
    staged = stage()
    link = Link()
    reader = open_reader(staged.folder, staged.manifest, ALL, [link])
    builder = WeightBuilder(staged.manifest, ALL, reader, torch.device("cpu"), torch_dtype(staged.manifest.dtype))
    loads = Loads(staged)
    load = loads.begin(*ALL, links=[link], builder=builder)
    assert torch.equal(loads.answer(ids, load.wait()), stock_answer(staged.folder, ids))
    assert link.bytes_moved == staged.manifest.bytes, "nothing is read twice"


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [("llama", ()), ("llama", (1, 2)), ("llama", (2,)), ("qwen2", (1, 2)), ("qwen2", (1, 3))],
    ids=str,
)
def test_stage_after_stage_is_what_peft_serves_and_in_the_end_the_original(stage, ids, kind, adapters):
    staged = stage(kind, dtype=torch.bfloat16, adapters=adapters)
    loads, answers = Loads(staged), {}
    for number in ALL:
        before = sum(link.bytes_moved for link in loads.links)
        view = loads.bring(number)
        moved = sum(link.bytes_moved for link in loads.links) - before
        assert 0 <= moved - staged.manifest.stages[number - 1].bytes < 2000, "a stage's own bytes and no others"
        passed = {i for i, layer in enumerate(view.layers) if isinstance(layer, PassLayer)}
        assert passed == set(staged.served.plan.missing(number)) and view.stage == number
        answers[number] = view, loads.answer(ids)
        with torch.inference_mode(), at_stage(staged.served, number, staged.adapters.get(number)) as model:
            assert torch.equal(answers[number][1], model(ids, use_cache=False).logits), number
    if 3 not in adapters:
        assert torch.equal(answers[3][1], stock_answer(staged.folder, ids))
        stock = AutoModelForCausalLM.from_pretrained(staged.folder).state_dict()
        assert {n: t.dtype for n, t in loads.model.state_dict().items()} == {n: t.dtype for n, t in stock.items()}
        assert all(torch.equal(tensor, stock[name]) for name, tensor in loads.model.state_dict().items())
    for view, answer in answers.values():
        assert torch.equal(loads.answer(ids, view), answer), "stages serve side by side"


def test_several_stages_at_once_take_the_last_ones_adapter(stage, ids):
    staged = stage(adapters=(1, 2))
    loads = Loads(staged)
    loads.bring(1, 2)
    with torch.inference_mode(), at_stage(staged.served, 2, staged.adapters[2]) as model:
        assert torch.equal(loads.answer(ids), model(ids, use_cache=False).logits)
    loads.bring(3)
    assert torch.equal(loads.answer(ids), stock_answer(staged.folder, ids))


def test_stages_share_their_weights(stage):
    staged = stage(adapters=(1,))
    loads = Loads(staged)
    first, second = loads.bring(1), loads.bring(2)
    assert first.layers[0] is not second.layers[0], "one has an adapter"
    assert first.base[0] is second.base[0] is second.layers[0]
    assert first.layers[0].mlp.up_proj.base is second.layers[0].mlp.up_proj
    assert first.ends["lm_head"] is second.ends["lm_head"]
    assert changed(first, second).start == 0 and changed(second, loads.bring(3)).start == 4


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3"])
def test_coarse_first_then_exact(stage, ids, kind, tied, dtype):
    staged = stage(kind, tied, torch.bfloat16, plan=lambda names: coarse_first(names, 6, dtype))
    expected = stock_answer(staged.folder, ids)
    loads = Loads(staged)
    coarse = loads.bring(1)
    rounded = loads.answer(ids)
    assert {parameter.dtype for parameter in loads.model.parameters()} == {torch.bfloat16}
    for name, tensor in staged.served.model.named_parameters():
        stored = getattr(torch, {"F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn"}[dtype])
        assert torch.equal(loads.model.get_parameter(name), tensor.to(stored).to(torch.bfloat16)), name
    assert not torch.equal(rounded, expected) and rounded.isfinite().all()
    exact = loads.bring(2)
    assert torch.equal(loads.answer(ids), expected)
    assert torch.equal(loads.answer(ids, coarse), rounded), "who began coarsely ends coarsely"
    assert torch.equal(loads.answer(ids, exact), expected)
    assert changed(coarse, exact).start == 0
    assert (loads.model.lm_head.weight is loads.model.model.embed_tokens.weight) == tied


def test_of_what_is_refined_at_once_only_the_refinement_is_read(stage, ids):
    staged = stage(plan=lambda names: coarse_first(names, 6))
    loads = Loads(staged)
    loads.bring(1, 2)
    assert torch.equal(loads.answer(ids), stock_answer(staged.folder, ids))
    coarse, exact = staged.manifest.stages
    assert loads.links[0].bytes_moved == exact.bytes > staged.manifest.bytes == coarse.bytes


def test_refining_one_layer_or_the_norm_alone(stage, ids):
    """Stage 1 is exact but for layer 3 and the norm; stage 2 mends one, stage 3 the other."""

    def plan(names: list[str]) -> LoadPlan:
        (first,) = single_stage(names, 6).stages
        layer = next(part for part in first.parts if part.layer == 3)
        head = first.parts[-1]
        coarse = tuple(replace(part, dtype="F8_E5M2") if part in (layer, head) else part for part in first.parts)
        refined = [Stage(name, (replace(part, action="refine"),)) for name, part in (("B", layer), ("C", head))]
        return LoadPlan((Stage("A", coarse), *refined))

    loads = Loads(stage(plan=plan))
    first, answer = loads.bring(1), loads.answer(ids)
    second = loads.bring(2)
    middle = loads.answer(ids)
    assert changed(first, second).start == 3 and first.layers[2] is second.layers[2]
    third = loads.bring(3)
    assert third.layers[3] is second.layers[3] and third.ends["norm"] is not second.ends["norm"]
    assert torch.equal(loads.answer(ids), stock_answer(loads.staged.folder, ids))
    assert torch.equal(loads.answer(ids, second), middle) and torch.equal(loads.answer(ids, first), answer)


def test_parts_come_in_forward_order_whatever_the_stages(stage):
    staged = stage(plan=lambda names: by_layers(names, [(4, 5), (0, 2), (1, 3)]))
    assert [part.name for part in parts_of(staged.manifest, (3, 1, 2))] == [
        "embedding",
        *(f"layer {i:02}" for i in range(6)),
        "head",
    ]


# as it arrives


def test_a_streamed_prefill_computes_while_the_rest_is_on_its_way(stage, ids):
    """One reader, so the files come one after another, the next one once the layer before it has computed."""
    staged = stage(dtype=torch.float32)
    parts = parts_of(staged.manifest, ALL)
    ends = list(accumulate(part.bytes for part in parts))
    link = Held(ends[1])
    loads = Loads(staged)
    load = loads.begin(*ALL, links=[link], threads=1)
    seen: dict[int, tuple[int, float, bool]] = {}

    def mark(i: int):
        def hook(*_) -> None:
            seen[i] = link.bytes_moved, time.monotonic(), load.arrived
            link.mark = ends[i + 2]

        return hook

    with load.streaming():
        for i, layer in enumerate(load.view.layers):
            layer.register_forward_hook(mark(i))
        streamed = loads.answer(ids, load.view)
    load.wait()
    assert torch.equal(streamed, stock_answer(staged.folder, ids))
    assert [seen[i][0] for i in range(6)] == ends[1:7], "no layer computes before its bytes are there"
    assert not any(arrived for _, _, arrived in seen.values())
    assert seen[0][1] < seen[3][1] < load.arrived_s
    assert 0 < load.stalled_s < 30 and load.placing_s > 0


@pytest.mark.parametrize(("costs_s", "afterwards"), [(0.0, 3), (math.inf, 2)])
def test_a_streamed_prefill_leaves_one_processor_to_the_load_until_all_is_there(
    stage, ids, costs_s: float, afterwards: int, monkeypatch: pytest.MonkeyPatch
):
    """And takes it back then if that saves more than it costs; after the block in any case."""
    monkeypatch.setattr(loader, "_SWITCH_S", costs_s)
    staged, before, threads = stage(), torch.get_num_threads(), []
    loads = Loads(staged)
    link = Held(sum(part.bytes for part in parts_of(staged.manifest, ALL)[:2]))
    load = loads.begin(*ALL, links=[link], threads=1)
    torch.set_num_threads(3)
    try:
        with load.streaming():
            for layer in load.view.layers:
                layer.register_forward_hook(lambda *_: threads.append(torch.get_num_threads()))
            load.view.layers[0].register_forward_hook(lambda *_: link.go.set())
            loads.answer(ids, load.view)
            load.wait()
            loads.answer(ids, load.view)
        assert threads[0] == 2 and threads[6:] == [afterwards] * 6 and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_gates_go_when_the_block_ends_and_hold_up_no_other_stage(stage, ids):
    """A refinement on its way, its forward passes waiting; the stage before answers meanwhile."""
    staged = stage(plan=lambda names: coarse_first(names, 6), dtype=torch.bfloat16)
    loads = Loads(staged)
    coarse = loads.bring(1)
    expected = loads.answer(ids)
    link = Held(1)
    load = loads.begin(2, links=[link], threads=1)
    with load.streaming():
        assert torch.equal(loads.answer(ids, coarse), expected)
        assert not load.arrived and load.stalled_s == 0
        link.go.set()
    view = load.wait()
    for module in [*view.layers, *view.ends.values()]:
        assert not module._forward_pre_hooks
    assert torch.equal(loads.answer(ids, view), stock_answer(staged.folder, ids))
