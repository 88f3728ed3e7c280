"""Where a server joins and when it moves: the neediest interval, never at the cost of a gap, and to rest in the end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.petals.placement import Rebalancing, block_rates, interval_to_join, most_rate, settled, swarm_rate
from firsttoken.petals.routing import Reachable
from firsttoken.study.errors import SwarmError
from firsttoken_extras.min_move_rebalancing import rule as min_move_rebalancing
from firsttoken_extras.min_move_rebalancing.rule import MinMoveRebalancing

DEPTH = 8


def server(name: str, first: int, last: int, rate: float = 1.0) -> Reachable:
    """Blocks ``first`` to ``last`` - 1, with ``rate`` tokens/s through them."""
    return Reachable(name, range(first, last), 0.0, rate * (last - first))


@st.composite
def swarms(draw: st.DrawFn, most: int = 8) -> list[Reachable]:
    """Servers of any spans and speeds."""
    spans = draw(st.lists(st.tuples(st.integers(0, DEPTH - 1), st.integers(1, DEPTH)), min_size=1, max_size=most))
    rates = st.sampled_from([0.3, 1.0, 1.7, 4.0])
    return [server(f"s{n}", min(a, DEPTH - k), min(a, DEPTH - k) + k, draw(rates)) for n, (a, k) in enumerate(spans)]


@settings(max_examples=100, deadline=None)
@given(servers=swarms(), count=st.integers(1, DEPTH))
def test_who_joins_takes_the_interval_with_the_least_throughput(servers: list[Reachable], count: int) -> None:
    rates = block_rates(servers, DEPTH)
    chosen = interval_to_join(servers, DEPTH, count)
    others = [sorted(rates[start : start + count]) for start in range(DEPTH - count + 1)]
    assert sorted(rates[chosen.start : chosen.stop]) == min(others) and others.index(min(others)) == chosen.start


def test_more_blocks_than_there_are_fit_nowhere() -> None:
    with pytest.raises(SwarmError, match="9 blocks does not fit a model of 8"):
        interval_to_join([server("a", 0, 3)], DEPTH, 9)


@settings(max_examples=50, deadline=None)
@given(servers=swarms(), rule=st.sampled_from([Rebalancing(), Rebalancing(0.95), MinMoveRebalancing()]))
def test_a_move_opens_no_gap_and_promises_enough(servers: list[Reachable], rule: Rebalancing) -> None:
    now = swarm_rate(servers, DEPTH)
    for one in servers:
        target = rule.move(one.name, servers, DEPTH)
        if target is None:
            continue
        assert len(target) == len(one.blocks) and target != one.blocks
        rest = [other for other in servers if other is not one]
        assert now == 0 or swarm_rate(rest, DEPTH) > 0, "while it loads nothing is left unserved that was served"
        assert target == rule.move(one.name, servers[::-1], DEPTH), "whatever order records come in"


@settings(max_examples=60, deadline=None)
@given(servers=swarms(most=6))
def test_a_swarm_that_has_settled_stays_and_covers_what_it_can(servers: list[Reachable]) -> None:
    rested = settled(tuple(servers), DEPTH)
    assert all(Rebalancing(1.0).move(one.name, rested, DEPTH) is None for one in rested)
    if sum(len(one.blocks) for one in servers) >= 2 * DEPTH:
        assert swarm_rate(rested, DEPTH) > 0


@settings(max_examples=40, deadline=None)
@given(servers=swarms(most=3))
def test_no_placement_beats_the_bound(servers: list[Reachable]) -> None:
    """All placements of up to three servers, tried; what the rule comes to is one of them."""
    starts = [range(DEPTH - len(one.blocks) + 1) for one in servers]
    ways = (
        [replace(one, blocks=range(at, at + len(one.blocks))) for one, at in zip(servers, ats, strict=True)]
        for ats in itertools.product(*starts)
    )
    best = max(swarm_rate(way, DEPTH) for way in ways)
    assert swarm_rate(settled(tuple(servers), DEPTH), DEPTH) <= best * (1 + 1e-9)
    assert best <= most_rate(servers, DEPTH) * (1 + 1e-9)


def rested(rule: Rebalancing, servers: list[Reachable]) -> list[Reachable]:
    """``servers`` after one that wants to has moved, and so on; fails where that has no end."""
    placed = list(servers)
    for _ in range(4 * len(placed)):
        moves = ((at, rule.move(one.name, placed, DEPTH)) for at, one in enumerate(placed))
        at, target = next(((at, target) for at, target in moves if target is not None), (None, None))
        if at is None:
            return placed
        placed[at] = replace(placed[at], blocks=target)
    pytest.fail("they move without end")


@settings(max_examples=60, deadline=None)
@given(servers=swarms(), fixed=st.integers(0, 7))
def test_fewest_moves_comes_to_rest_and_no_slower(servers: list[Reachable], fixed: int) -> None:
    placed = [replace(one, fixed=number == fixed) for number, one in enumerate(servers)]
    after = rested(MinMoveRebalancing(), placed)
    assert swarm_rate(after, DEPTH) >= swarm_rate(placed, DEPTH)
    assert [one.blocks for one in after if one.fixed] == [one.blocks for one in placed if one.fixed]


def test_fewest_moves_asks_only_those_who_must_go() -> None:
    """Half of the blocks has one server, the other three: one goes, where the paper's rule lets whoever asks go."""
    servers = [server("a", 0, 4), *(server(name, 4, 8) for name in "bcd")]
    assert [one.name for one in servers if MinMoveRebalancing().move(one.name, servers, DEPTH)] == ["b"]
    assert [one.name for one in servers if Rebalancing().move(one.name, servers, DEPTH)] == ["b", "c", "d"]


def test_where_no_single_move_helps_fewest_moves_tries_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 2, 2 and 4 blocks: each move alone takes from some block what it gives to another."""
    servers = [server("a", 0, 2), server("b", 1, 3), server("c", 3, 7)]
    assert swarm_rate(rested(MinMoveRebalancing(), servers), DEPTH) == 1.0
    monkeypatch.setattr(min_move_rebalancing, "_DRAWS", 0)
    min_move_rebalancing._foreseen.cache_clear()
    assert swarm_rate(rested(MinMoveRebalancing(), servers), DEPTH) == 0.0
    min_move_rebalancing._foreseen.cache_clear()


def test_the_papers_rule_waits_for_a_third_more() -> None:
    """Two servers on the first half, one on the second: moving one to cover all would bring 1 instead of 1."""
    uneven = [server("a", 0, 4), server("b", 0, 4), server("c", 4, 8)]
    assert Rebalancing().move("b", uneven, DEPTH) is None
    fourth = [*uneven, server("d", 0, 4)]
    assert Rebalancing().move("d", fourth, DEPTH) == range(4, 8), "1 becomes 2"
    assert Rebalancing().move("c", fourth, DEPTH) is None, "it is the only one there"
    assert Rebalancing(enough=0.5).move("d", fourth, DEPTH) is None, "1 of at most 2 is enough"


def test_what_no_rule_has_is_refused() -> None:
    for bad in ({"quality": 0.0}, {"quality": 1.1}, {"enough": 0.0}):
        with pytest.raises(SwarmError, match="must be above 0 and at most 1, not "):
            Rebalancing(**bad)
    with pytest.raises(SwarmError, match="server ghost is not announced"):
        Rebalancing().move("ghost", [server("a", 0, 8)], DEPTH)
