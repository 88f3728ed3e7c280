"""What a choice costs elsewhere: the identities of a transfer, and that no item judges the choice it made."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.droidspeak.profile.profile_transfer import (
    best_of_size,
    random_halves,
    resampled,
    select_items,
    transfer,
)
from firsttoken.study.errors import RequestError

ALL, LOW, HIGH = Group(0, 4), Group(0, 2), Group(2, 4)


def profiles(*, low: float, high: float, items: int = 8, own: float = 1.0) -> list[Profiled]:
    """Four groups of a model of four layers; every item loses the same."""
    losses = {NOTHING: 1.0, LOW: low, HIGH: high, ALL: 0.0}
    return [Profiled(group, (own,) * items, (own - loss,) * items) for group, loss in losses.items()]


def within(groups: list[Profiled]) -> Profiled:
    return smallest_within(groups, 0.05)


def test_a_task_that_needs_other_layers():
    here, there = profiles(low=0.01, high=0.5), profiles(low=0.3, high=0.02)
    moved = transfer(here, there, within, draws=3)
    assert set(moved.groups) == {LOW} and moved.usual == LOW and moved.layers == 2
    assert moved.item_loss == pytest.approx([0.3] * 8)
    assert transfer(there, there, within, draws=3).item_loss == pytest.approx([0.02] * 8)


def test_the_half_that_judges_did_not_choose_unless_it_is_to():
    """Each group spoils one half of the items of a split, so whoever chooses on a half loses on the other."""
    first, second = random_halves(8, seed=0)
    own = (1.0,) * 8
    spoils = {LOW: first, HIGH: second}
    groups = [
        Profiled(group, own, tuple(0.0 if item in spoils.get(group, ()) else 1.0 for item in range(8)))
        for group in (LOW, HIGH, ALL)
    ]
    unseen = transfer(groups, groups, best_of_size(2), draws=1)
    assert unseen.groups == (HIGH, LOW) and unseen.item_loss == (1.0,) * 8
    seen = transfer(groups, groups, best_of_size(2), draws=1, on_same_items=True)
    assert set(seen.groups) == {LOW, HIGH} and seen.item_loss == (0.0,) * 8


def test_tasks_of_unequal_numbers_of_items():
    moved = transfer(profiles(low=0.01, high=0.5, items=5), profiles(low=0.3, high=0.0, items=9), within, draws=2)
    assert len(moved.item_loss) == 9


def test_groups_of_one_task_only_are_refused():
    with pytest.raises(RequestError, match="group 2-3 was profiled on one task only"):
        transfer(profiles(low=0, high=0), profiles(low=0, high=0)[:2], within, draws=1)


def test_the_best_of_a_size():
    chosen = best_of_size(2)(profiles(low=0.2, high=0.1))
    assert chosen.group == HIGH
    assert best_of_size(2)(profiles(low=0.1, high=0.1)).group == LOW


def test_a_sample_is_judged_by_the_others():
    found = resampled(profiles(low=0.01, high=0.5), 4, within, draws=10)
    assert len(found) == 10 and {choice.group for choice in found} == {LOW}
    assert [choice.relative_loss for choice in found] == pytest.approx([0.01] * 10)
    assert resampled(profiles(low=0.01, high=0.5), 4, within, draws=10) == found


def test_small_samples_choose_less_well():
    """Half of the items need the upper layers and half the lower ones: only many items show that both are needed."""
    own = (1.0,) * 64
    groups = [
        Profiled(LOW, own, (0.6, 1.0) * 32),
        Profiled(HIGH, own, (1.0, 0.6) * 32),
        Profiled(ALL, own, own),
    ]
    few, many = ([choice.group == ALL for choice in resampled(groups, items, within, draws=50)] for items in (2, 64))
    assert sum(many) == 50 and sum(few) < 40


@pytest.mark.parametrize(("items", "there"), [(0, 8), (9, 8), (1, 1)])
def test_samples_out_of_range(items: int, there: int):
    with pytest.raises(RequestError, match=f"cannot draw {items} of {there} items"):
        resampled(profiles(low=0, high=0, items=there), items, within, draws=1)


def test_one_item_cannot_be_halved():
    with pytest.raises(RequestError, match="1 items cannot be halved"):
        random_halves(1, seed=0)


@given(st.integers(2, 60), st.integers(0, 5))
@settings(max_examples=40)
def test_halves_are_a_partition(items: int, seed: int):
    first, second = random_halves(items, seed)
    assert sorted(first + second) == list(range(items)) and 0 <= len(second) - len(first) <= 1


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12))
@settings(max_examples=30)
def test_taken_items_keep_their_pairs(items: list[int]):
    groups = [Profiled(LOW, tuple(range(8)), tuple(range(10, 18)))]
    (found,) = select_items(groups, items)
    assert [mixed - own for own, mixed in zip(found.own, found.mixed, strict=True)] == [10] * len(items)
