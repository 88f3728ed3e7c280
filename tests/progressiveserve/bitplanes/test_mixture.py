"""Plans that mix bits and layers: every bit comes once, the end is exact, and what is no plan is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loads import Loads
from transformers import AutoModelForCausalLM

from firsttoken.__main__ import main
from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan
from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes.assemble import assemble
from firsttoken_extras.bitplanes.first_stage import coarse, coded_bytes, layer_bytes
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of
from firsttoken_extras.bitplanes.plan_spec import UNCUT, LaterLayers, PlanSpec
from firsttoken_extras.bitplanes.plane_plan import by_planes
from firsttoken_studies.progressiveserve.frontier import (
    Sparse,
    precision_frontier,
    precision_summary,
    sparse,
)

DEPTH = 6
MATRICES, VECTOR = ("self_attn.q_proj", "mlp.down_proj"), "input_layernorm"
SHAPES = {"model.embed_tokens.weight": (40, 8), "model.norm.weight": (8,), "lm_head.weight": (40, 8)}
SHAPES |= {f"model.layers.{layer}.{name}.weight": (8, 8) for layer in range(DEPTH) for name in MATRICES}
SHAPES |= {f"model.layers.{layer}.{VECTOR}.weight": (8,) for layer in range(DEPTH)}
ANY = st.sampled_from(["", UNCUT, *SPLITS])


@st.composite
def mixtures(draw: st.DrawFn) -> PlanSpec:
    """Up to three ranges of layers that wait, in any order, never all layers."""
    marks = sorted(draw(st.sets(st.integers(0, DEPTH), max_size=6)))
    ranges = [LaterLayers(*pair, draw(ANY)) for pair in zip(marks[::2], marks[1::2], strict=False)]
    if sum(one.end - one.first for one in ranges) == DEPTH:
        ranges = ranges[1:]
    later = tuple(draw(st.permutations(ranges)))
    return PlanSpec(draw(st.sampled_from(list(SPLITS))), later, draw(ANY))


def pieces(plan: LoadPlan) -> dict[str, list[tuple[str, int]]]:
    """What comes of every tensor, in order: the split and the plane of it, or UNCUT."""
    found: dict[str, list[tuple[str, int]]] = {}
    for part in (part for stage in plan.stages for part in stage.parts):
        for name in part.tensors:
            coding = part.coding_of(name)
            found.setdefault(name, []).append((coding.split, coding.plane) if coding else (UNCUT, 0))
    return found


def once(plan_spec: PlanSpec, name: str) -> list[tuple[str, int]]:
    """What has to come of a tensor."""
    split = plan_spec.split_of(layer_of(name)) if len(SHAPES.get(name, (1, 1))) > 1 and "norm" not in name else UNCUT
    return [(split, plane) for plane in range(planes_of(split))]


@settings(max_examples=60, deadline=None)
@given(plan_spec=mixtures(), data=st.data())
def test_every_bit_of_every_tensor_comes_once_in_the_order_of_the_forward_pass(plan_spec, data):
    assert PlanSpec.parse(str(plan_spec)) == plan_spec
    plan = by_planes(SHAPES, plan_spec)
    assert pieces(plan) == {name: once(plan_spec, name) for name in pieces(plan)}
    assert pieces(plan).keys() == SHAPES.keys()
    assert plan.layers(1) == tuple(layer for layer in range(DEPTH) if layer not in plan_spec.waiting)
    for stage in plan.stages:
        places = [
            -1 if part.name == "embedding" else DEPTH if part.layer is None else part.layer for part in stage.parts
        ]
        assert places == sorted(places)
    # the control: a part left out, or brought again, is no plan
    number = data.draw(st.integers(0, len(plan.stages) - 1))
    parts = plan.stages[number].parts
    index = data.draw(st.integers(0, len(parts) - 1))
    for spoilt in (parts[:index] + parts[index + 1 :], parts[: index + 1] + parts[index:]):
        stages = list(plan.stages)
        stages[number] = replace(stages[number], parts=spoilt)
        with pytest.raises(StageError):
            replace(plan, stages=tuple(stages)).check(list(SHAPES))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan_spec=mixtures(), dtype=st.sampled_from([torch.bfloat16, torch.float16]), tied=st.booleans())
def test_any_plan_ends_bit_by_bit_as_what_was_staged(stage_planes, tmp_path, plan_spec, dtype, tied):
    for before in ("staged-llama", "whole"):
        shutil.rmtree(tmp_path / before, ignore_errors=True)
    staged = stage_planes(str(plan_spec), dtype, tied=tied)
    assert pieces(staged.manifest.plan) == {name: once(plan_spec, name) for name in pieces(staged.manifest.plan)}
    loads = Loads(staged)
    for number in range(1, len(loads.manifest.stages) + 1):
        loads.bring(number)
    loads.view.activate(loads.model)
    stock = AutoModelForCausalLM.from_pretrained(assemble(staged.folder, tmp_path / "whole"))
    for model in (loads.model, stock):
        found = dict(model.named_parameters())
        for name, parameter in staged.served.model.named_parameters():
            assert torch.equal(found[name].data.view(torch.int16), parameter.data.view(torch.int16)), name


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("bits, 0:6 later", "the plan leaves all 6 layers for later: the first stage needs at least one"),
        ("bits, 0:3 later, 3:6 later", "the plan leaves all 6 layers for later"),
        ("bits, 1:4 later, 3:5 later", "the layers 1:4 and 3:5 overlap: name each layer once"),
        ("bits, 4:9 later", "the plan names the layers 4:9, and the model has 0:6"),
        ("bits, 3:3 later", "3:3 holds no layers"),
        ("bits, ends 7 bits", "no split of weights is called '7 bits': choose one of bits, bits in three, 8 bits"),
        ("bits, 1:2 later as half", "no split of weights is called 'half'"),
        ("bits, layers 1:2", "'layers 1:2' is no part of a plan: write SPLIT[, FIRST:END later[ as SPLIT]]"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(tmp_path, capsys, plan, words):
    chosen = ["--set", "model=random:tiny-6", "--set", "dtype=bfloat16"]
    assert main(["stage", str(tmp_path / "staged"), "--planes", plan, *chosen]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1] and not any("Traceback" in line for line in said)
    assert not (tmp_path / "staged").exists() and not (tmp_path / "staged.partial").exists()


def test_a_first_stage_in_memory_is_the_one_that_is_staged(stage_planes, ids):
    """Answers and bytes, with layers that wait and ends of their own; and the model is as it was after it."""
    staged = stage_planes("5 bits, 2:4 later as uncut, ends 8 bits")
    loads, model = Loads(staged), staged.served.model
    plan_spec = PlanSpec.parse("5 bits, 2:4 later as uncut, ends 8 bits")
    first, before = loads.bring(1), {name: one.data.clone() for name, one in model.named_parameters()}
    with coarse(model, plan_spec, "BF16"), torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, loads.answer(ids, first))
    assert all(torch.equal(before[name], one.data) for name, one in model.named_parameters())
    size, each = coded_bytes(model, plan_spec, "BF16"), layer_bytes(model, plan_spec, "BF16")
    written = [
        sum(entry.end - entry.start for part in stage.parts for entry in part.tensors.values())
        for stage in loads.manifest.stages
    ]
    assert size.first == written[0] and size.planes == sum(written)
    assert size.first == sum(one.first for layer, one in each.items() if layer not in (2, 3))
    with (
        pytest.raises(StageError, match="do not fit a model of 6 layers"),
        coarse(model, PlanSpec("bits", (LaterLayers(5, 7),)), "BF16"),
    ):
        pass


def test_the_largest_weights_in_a_share_of_the_bytes(make_model):
    model = make_model("llama", layers=3)
    before = {name: one.data.clone() for name, one in model.named_parameters()}
    with sparse(model, Sparse.parse("sparse 0.4"), "BF16") as size:
        assert size.first / size.plain == pytest.approx(0.4, abs=0.03)
        for name, one in model.named_parameters():
            gone = (one == 0) & (before[name] != 0)
            assert one.dim() > 1 or not gone.any()
            assert not gone.any() or before[name].abs()[gone].max() <= before[name].abs()[~gone].max()
    assert all(torch.equal(before[name], one) for name, one in model.named_parameters())
    with pytest.raises(StageError, match="'sparse little' keeps no share of the bytes"):
        Sparse.parse("sparse little")


def test_mixtures_and_sparsity_stand_in_the_frontier_beside_exact_weights_of_their_dtype(paper, tmp_path):
    cuts = ["bits of F16", "bits, 1:3 later, ends 8 bits of BF16", "sparse 0.5 of BF16", "lossless of F16"]
    sections = {**paper.sections, "precision": {**paper.sections["precision"], "cuts": cuts, "items": 2, "windows": 1}}
    profile = replace(paper, sections=sections)
    rows = precision_frontier(profile).rows
    exact = {row["variant"]: row["exact"] for row in rows}
    mixed, pruned = "bits_1_3_later_ends_8_bits_bf16", "sparse_0_5_bf16"
    assert exact | {"layers": "s0"} == exact
    assert (exact["bits_fp16"], exact[mixed], exact[pruned]) == ("lossless_fp16", "s0", "s0")
    summary = precision_summary(rows, profile.parameters())
    bits, plan_spec = {"variant": "bits", "dtype": "fp16"}, {"variant": "bits, 1:3 later, ends 8 bits", "dtype": "bf16"}
    for place in (bits, plan_spec, {"variant": "sparse 0.5", "dtype": "bf16"}):
        assert summary.value("perplexity_x", **place, than="exact") != 1 and summary.of("em_drop", **place)
    assert summary.value("byte_share", **plan_spec) < summary.value("byte_share", **bits)
    with pytest.raises(StageError, match="the plan names the layers 4:9, and the model has 0:6"):
        cuts[:] = ["bits, 4:9 later of BF16"]
        precision_frontier(profile)
