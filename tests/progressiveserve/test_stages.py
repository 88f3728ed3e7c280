"""The stage plan: the report's groups, blocks of any size at any depth, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.progressiveserve.stages import REPORT_PLAN, STAGES, StagePlan
from firsttoken.study.errors import StageError


@st.composite
def plans(draw: st.DrawFn) -> StagePlan:
    depth = draw(st.integers(2, 90))
    size = draw(st.integers(1, depth - 1))
    start = draw(st.integers(0, depth - size))
    return StagePlan.from_block(depth, range(start, start + size))


def test_the_report_plan_is_the_report_groups_counted_from_zero() -> None:
    def from_one(layers: tuple[int, ...]) -> list[int]:
        return [i + 1 for i in layers]

    assert from_one(REPORT_PLAN.a) == [*range(1, 21), *range(29, 33)]
    assert from_one(REPORT_PLAN.b) == [21, 22, 23, 24]
    assert from_one(REPORT_PLAN.c) == [25, 26, 27, 28]
    assert [len(REPORT_PLAN.present(stage)) for stage in STAGES] == [24, 28, 32]


@given(plans())
@settings(deadline=None)
def test_groups_partition_the_layers_and_stages_only_add(plan: StagePlan) -> None:
    layers = tuple(range(plan.depth))
    assert sorted(plan.a + plan.b + plan.c) == list(layers)
    assert plan.block == plan.b + plan.c
    assert len(plan.b) - len(plan.c) in (0, 1)
    assert plan.missing(1) == plan.block and plan.missing(2) == plan.c and plan.missing(3) == ()
    assert plan.present(1) == plan.a and plan.present(3) == layers
    assert set(plan.c) <= set(plan.missing(1))
    for stage in STAGES:
        assert sorted(plan.present(stage) + plan.missing(stage)) == list(layers)
    assert set(plan.present(1)) < set(plan.present(2)) <= set(plan.present(3))


@pytest.mark.parametrize(
    ("depth", "block", "says"),
    [
        (8, [], "the removed block is empty: choose a block size of 1 or more"),
        (8, range(8), "the removed block holds 8 of 8 layers: at least one must stay"),
        (2, range(5), "the removed block holds 5 of 2 layers"),
        (8, [6, 7, 8], "does not fit a model of 8 layers, 0-7"),
        (8, [-1, 0], "does not fit a model of 8 layers"),
        (8, [3, 3], "does not fit a model of 8 layers"),
    ],
)
def test_blocks_that_do_not_fit(depth: int, block: list[int], says: str) -> None:
    with pytest.raises(StageError, match=says) as caught:
        StagePlan.from_block(depth, block)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [0, 4, -1])
@pytest.mark.parametrize("ask", [StagePlan.missing, StagePlan.present])
def test_unknown_stages(stage: int, ask) -> None:
    with pytest.raises(StageError, match=f"^stage {stage} does not exist: choose one of 1, 2, 3$"):
        ask(REPORT_PLAN, stage)
