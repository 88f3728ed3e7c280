"""Plans of planes: every bit comes once. First stages in memory, also of layers that wait. What is no plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loads import Loads

from firsttoken.progressiveserve.checkpoint.plan import LoadPlan
from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes.first_stage import PlanSpec, coarse, coded_bytes, layer_bytes
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of
from firsttoken_extras.bitplanes.plane_plan import by_planes
from firsttoken_studies.nb17_bits_before_layers.frontier import (
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


def pieces(plan: LoadPlan) -> dict[str, list[tuple[str, int]]]:
    """What comes of every tensor, in order: the split and the plane of it, "" where it comes whole."""
    found: dict[str, list[tuple[str, int]]] = {}
    for part in (part for stage in plan.stages for part in stage.parts):
        for name in part.tensors:
            coding = part.coding_of(name)
            found.setdefault(name, []).append((coding.split, coding.plane) if coding else ("", 0))
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_every_bit_of_every_tensor_comes_once_in_the_order_of_the_forward_pass(split):
    plan = by_planes(SHAPES, split)
    planes = [(split, plane) for plane in range(planes_of(split))]
    assert pieces(plan) == {name: planes if len(shape) > 1 else [("", 0)] for name, shape in SHAPES.items()}
    for stage in plan.stages:
        places = [
            -1 if part.name == "embedding" else DEPTH if part.layer is None else part.layer for part in stage.parts
        ]
        assert places == sorted(places) and len(places) == DEPTH + 2
    # the control: a part left out, or brought again, is no plan
    for number, stage in enumerate(plan.stages):
        for index in range(len(stage.parts)):
            parts = stage.parts
            for spoilt in (parts[:index] + parts[index + 1 :], parts[: index + 1] + parts[index:]):
                stages = [*plan.stages]
                stages[number] = replace(stage, parts=spoilt)
                with pytest.raises(StageError):
                    replace(plan, stages=tuple(stages)).check(list(SHAPES))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("bits, 3:3 later", "3:3 holds no layers"),
        ("bits, ends 7 bits", "no split of weights is called '7 bits': choose one of bits, bits in three, 8 bits"),
        ("bits, 1:2 later, 3:4 later", "is no plan: write SPLIT"),
        ("bits, layers 1:2", r"'bits, layers 1:2' is no plan: write SPLIT\[, FIRST:END later\]\[, ends SPLIT\]"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(plan, words):
    with pytest.raises(StageError, match=words):
        PlanSpec.parse(plan)


@pytest.mark.parametrize("split", ["bits", "5 bits"])
def test_a_first_stage_in_memory_is_the_one_that_is_staged(stage_planes, ids, split):
    """Answers and bytes; and the model is as it was after it."""
    staged = stage_planes(split)
    loads, model, plan_spec = Loads(staged), staged.served.model, PlanSpec.parse(split)
    first, before = loads.bring(1), {name: one.data.clone() for name, one in model.named_parameters()}
    with coarse(model, plan_spec, "BF16"), torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, loads.answer(ids, first))
    assert all(torch.equal(before[name], one.data) for name, one in model.named_parameters())
    size = coded_bytes(model, plan_spec, "BF16")
    written = [
        sum(entry.end - entry.start for part in stage.parts for entry in part.tensors.values())
        for stage in loads.manifest.stages
    ]
    assert size.first == written[0] and size.planes == sum(written)


def test_layers_that_wait_and_ends_of_their_own(stage_planes):
    """The bytes are those of the layers that do not wait, and of the ends by their own split."""
    model = stage_planes("bits").served.model
    mixed = PlanSpec.parse("5 bits, 2:4 later, ends 8 bits")
    sizes = layer_bytes(model, mixed, "BF16")
    assert sizes[None] == layer_bytes(model, PlanSpec("8 bits"), "BF16")[None]
    assert coded_bytes(model, mixed, "BF16").first == sum(
        one.first for layer, one in sizes.items() if layer not in (2, 3)
    )
    with (
        pytest.raises(StageError, match="do not fit a model of 6 layers"),
        coarse(model, PlanSpec("bits", range(5, 7)), "BF16"),
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
    with pytest.raises(StageError, match="the plan names the layers 4:9, of a model with 0:6"):
        cuts[:] = ["bits, 4:9 later of BF16"]
        precision_frontier(profile)
    with pytest.raises(StageError, match="the plan leaves all 6 layers for later: the first stage needs at least one"):
        cuts[:] = ["bits, 0:6 later of BF16"]
        precision_frontier(profile)
