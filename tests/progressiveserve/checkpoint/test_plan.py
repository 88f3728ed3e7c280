"""Plans: every tensor once and in forward order, and one line that names what does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.progressiveserve.checkpoint.plan import (
    EMBEDDING,
    HEAD,
    NORM,
    LoadPlan,
    Part,
    Stage,
    by_layers,
    single_stage,
    staged,
)
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import StageError


def names_of(depth: int, tied: bool = True) -> list[str]:
    kinds = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "input_layernorm.weight")
    layers = [f"model.layers.{i}.{kind}" for i in range(depth) for kind in kinds]
    return [EMBEDDING, *layers, NORM, *([] if tied else [HEAD])]


def refused(names, groups, words) -> None:
    with pytest.raises(StageError, match=words) as caught:
        by_layers(names, groups)
    assert "\n" not in str(caught.value)


def in_two(part: Part) -> tuple[Part, Part]:
    return replace(part, tensors=part.tensors[:1]), replace(part, tensors=part.tensors[1:])


@st.composite
def partitions(draw) -> list[list[int]]:
    """The layers of a model dealt to groups, in any order within a group."""
    order = draw(st.permutations(range(draw(st.integers(1, 30)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)))) | {0, len(order)})
    return [list(order[a:b]) for a, b in pairwise(cuts)]


@given(partitions(), st.booleans())
def test_any_partition_brings_every_tensor_once_and_in_forward_order(groups, tied):
    names = names_of(sum(map(len, groups)), tied)
    plan = by_layers(names, groups)
    assert [stage.name for stage in plan.stages[:3]] == ["A", "B", "C"][: len(groups)]
    assert len({stage.name for stage in plan.stages}) == len(groups)
    brought = [name for stage in plan.stages for part in stage.parts for name in part.tensors]
    assert sorted(brought) == sorted(names)
    first = plan.stages[0].parts
    assert (first[0].tensors, first[-1].tensors) == ((EMBEDDING,), (NORM,) if tied else (NORM, HEAD))
    for k, (stage, group) in enumerate(zip(plan.stages, groups, strict=True), start=1):
        assert [part.layer for part in stage.parts if part.layer is not None] == sorted(group)
        order = [names.index(name) for part in stage.parts for name in part.tensors]
        assert order == sorted(order)
        assert plan.layers(k) == tuple(sorted(chain(*groups[:k])))


@given(partitions(), st.data())
def test_a_layer_dropped_or_doubled_is_named(groups, data):
    names = names_of(sum(map(len, groups)))
    chosen = data.draw(st.sampled_from(groups))
    layer = data.draw(st.sampled_from(chosen))
    doubled = [list(group) for group in groups]
    data.draw(st.sampled_from(doubled)).append(layer)
    refused(names, doubled, rf"overlap: layer {layer} \(.*stage [A-Z]+ and again in stage [A-Z]+; name it once")
    left = [[i for i in group if i != layer] for group in groups]
    if left := [group for group in left if group]:
        refused(names, left, rf"hole: layer {layer} \(.*in no stage")


def test_the_stages_of_the_report():
    plan = staged(names_of(8), StagePlan.from_block(8, range(3, 7)))
    layers = [[part.layer for part in stage.parts] for stage in plan.stages]
    assert layers == [[None, 0, 1, 2, 7, None], [3, 4], [5, 6]]
    assert [part.name for part in plan.stages[0].parts][:2] == ["embedding", "layer 00"]
    assert [part.name for part in plan.stages[0].parts][-2:] == ["layer 07", "head"]
    assert len(single_stage(names_of(8), 8).stages) == 1


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], "the plan has no stages"),
        ([[0, 1, 2], []], "stage B has no layers"),
        ([[0, 1], [2, 7]], r"stage B names layer 7: the model has 3, from 0"),
        ([[-1, 0, 1, 2]], "stage A names layer -1"),
    ],
)
def test_groups_that_do_not_fit(groups, words):
    refused(names_of(3), groups, words)


def test_another_architecture():
    refused(["transformer.h.0.attn.weight"], [[0]], "transformer.h.0.attn.weight is no tensor of a Llama-like model")
    refused([NORM, "model.layers.0.x"], [[0]], "brings model.embed_tokens.weight, which the model does not have")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, b: [a], r"hole: layer 1 \(model.layers.1.self_attn.q_proj.weight\) is in no stage"),
        (lambda a, b: [a, b, replace(b, name="again")], "overlap: layer 1 .* in stage B and again in stage again"),
        (lambda a, b: [a, Stage("B", ())], "stage B or a part of it is empty"),
        (lambda a, b: [a, Stage("B", (Part("nothing", ()),))], "stage B or a part of it is empty"),
        (lambda a, b: [a, Stage("B", (Part("x", ("model.x",)),))], "stage B brings model.x, which the model does not"),
        (
            lambda a, b: [Stage("A", a.parts[:-1]), Stage("B", (*b.parts, a.parts[-1]))],
            r"model\.norm\.weight comes in stage B, and is needed as of stage A; bring them together",
        ),
        (
            lambda a, b: [a, Stage("B", in_two(b.parts[0])[:1]), Stage("C", in_two(b.parts[0])[1:])],
            r"layer 1 \(.*\) comes in stage C, and is needed as of stage B; bring them together",
        ),
        (
            lambda a, b: [a, Stage("B", tuple(replace(p, layer=0) for p in b.parts))],
            r"part layer 01 of stage B brings model\.layers\.1\.[\w.]* of another layer",
        ),
        (
            lambda a, b: [a, Stage("B", tuple(replace(p, action="refine") for p in b.parts))],
            r"stage B refines layer 1 .* before a stage has brought it",
        ),
        (
            lambda a, b: [a, Stage("B", tuple(replace(p, dtype="F8_E5M2") for p in b.parts))],
            r"layer 1 .* stays F8_E5M2: add a part that refines it",
        ),
        (lambda a, b: [a, Stage("B", tuple(replace(p, dtype="F4") for p in b.parts))], "dtype 'F4': choose"),
        (lambda a, b: [a, Stage("B", tuple(replace(p, action="drop") for p in b.parts))], "action 'drop'"),
    ],
)
def test_plans_made_by_hand_are_checked(change, words):
    names = names_of(2)
    plan = LoadPlan(tuple(change(*by_layers(names, [[0], [1]]).stages)))
    with pytest.raises(StageError, match=words) as caught:
        plan.check(names)
    assert "\n" not in str(caught.value)
