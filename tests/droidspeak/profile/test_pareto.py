"""The frontier and the choice against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.profile.pareto import Profiled, critical_layers, frontier, smallest_within
from firsttoken.study.errors import RequestError

OWN = (1.0, 0.5, 1.0, 0.5)


def profiled(lo: int, layers: int, lost: int) -> Profiled:
    """A group that loses ``lost`` quarters of a point on the first item."""
    return Profiled(Group(lo, lo + layers), OWN, (OWN[0] - lost / 4, *OWN[1:]))


GROUPS = st.lists(
    st.builds(profiled, st.integers(0, 3), st.integers(0, 5), st.integers(-1, 4)),
    max_size=12,
    unique_by=lambda g: g.group,
)


def beats(a: Profiled, b: Profiled) -> bool:
    """As good in both, and better in one (or lower, where both are equal)."""
    size, loss = len(a.group) - len(b.group), a.relative_loss - b.relative_loss
    return size <= 0 and loss <= 0 and (size < 0 or loss < 0 or a.group.lo < b.group.lo)


@given(GROUPS)
@settings(max_examples=150, deadline=None)
def test_the_frontier_is_what_nothing_beats(groups):
    found = frontier(groups)
    assert {g.group for g in found} == {g.group for g in groups if not any(beats(o, g) for o in groups)}
    assert [len(g.group) for g in found] == sorted({len(g.group) for g in found})
    losses = [g.relative_loss for g in found]
    assert losses == sorted(set(losses), reverse=True)


@given(GROUPS, st.sampled_from([-1.0, 0.0, 1 / 12, 0.1, 0.25, 1.0]))
@settings(max_examples=150, deadline=None)
def test_the_smallest_within_is_on_the_frontier_and_none_within_is_smaller(groups, bound):
    within = [g for g in groups if g.relative_loss <= bound]
    if not within:
        with pytest.raises(RequestError, match=f"no profiled group loses at most {100 * bound:g} %"):
            smallest_within(groups, bound)
        return
    chosen = smallest_within(groups, bound)
    assert chosen in within and chosen in frontier(groups)
    assert len(chosen.group) == min(len(g.group) for g in within)


def test_losses_are_of_the_mean_and_of_the_receiver_s_own():
    group = profiled(0, 2, 3)
    assert group.relative_loss == pytest.approx(0.75 / 3)
    assert (group.loss.estimate, group.loss.n) == (pytest.approx(0.75 / 4), 4)
    assert group.loss.low <= group.loss.estimate <= group.loss.high
    assert Profiled(Group(0, 1), (0.0, 0.0), (0.0, 0.0)).relative_loss == 0
    assert profiled(0, 2, -1).relative_loss < 0, "a mixture may be better"


def test_critical_layers_lose_more_than_their_share():
    scores = [(0, 1.0), (1, 0.75), (2, 0.7), (3, 1.1), (4, 0.0)]
    assert critical_layers(scores, 1.0, 0.25) == [2, 4]
    assert critical_layers(scores, 1.0, 0.0) == [1, 2, 4]
    assert critical_layers([], 1.0, 0.25) == []
