"""The shortest chain is the one that trying all finds; rows are split so that no other split ends earlier."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firsttoken.petals.routing import Hop, Reachable, best_chain, chain_s
from firsttoken.study.errors import SwarmError

LAYERS = 6


@st.composite
def swarms(draw: st.DrawFn, layers: int = LAYERS, most: int = 5) -> list[Reachable]:
    """Up to ``most`` servers of any spans, pings and speeds, some of them equal."""
    count = draw(st.integers(1, most))
    servers = []
    for number in range(count):
        first = draw(st.integers(0, layers - 1))
        last = draw(st.integers(first + 1, layers))
        ping, rate = draw(st.sampled_from([0.0, 0.001, 0.1])), draw(st.sampled_from([1.0, 10.0, 1000.0]))
        servers.append(Reachable(f"s{number}", range(first, last), ping, rate))
    return servers


def every_chain(servers: list[Reachable], first: int, stop: int) -> list[list[Hop]]:
    """All ways to get from ``first`` to ``stop``, by trying them."""
    if first == stop:
        return [[]]
    return [
        [Hop(server, range(first, end)), *rest]
        for server in servers
        if first in server.blocks
        for end in range(first + 1, min(server.blocks.stop, stop) + 1)
        for rest in every_chain(servers, end, stop)
    ]


@settings(max_examples=150, deadline=None)
@given(servers=swarms(), start=st.integers(0, 2), gone=st.integers(0, 9))
def test_the_chain_is_the_shortest_there_is(servers: list[Reachable], start: int, gone: int) -> None:
    ways = every_chain([server for server in servers if server.name != f"s{gone}"], start, LAYERS)
    if not ways:
        with pytest.raises(SwarmError, match="no server that answers has blocks"):
            best_chain(servers, range(start, LAYERS), without={f"s{gone}"})
        return
    chain = best_chain(servers, range(start, LAYERS), without={f"s{gone}"})
    assert chain_s(chain) == pytest.approx(min(map(chain_s, ways)), abs=1e-12)
    assert [block for hop in chain for block in hop.blocks] == list(range(start, LAYERS))
    assert all(set(hop.blocks) <= set(hop.server.blocks) for hop in chain)


@settings(max_examples=50, deadline=None)
@given(servers=swarms())
def test_the_order_of_the_records_changes_nothing(servers: list[Reachable]) -> None:
    assume(every_chain(servers, 0, LAYERS))
    assert best_chain(servers, range(LAYERS)) == best_chain(servers[::-1], range(LAYERS))


def test_of_equal_chains_the_one_with_fewer_hops() -> None:
    halves = [Reachable("a", range(0, 3), 0.0, 1.0), Reachable("b", range(3, 6), 0.0, 1.0)]
    whole = Reachable("c", range(0, 6), 0.0, 1.0)
    assert [hop.server.name for hop in best_chain([*halves, whole], range(6))] == ["c"]


@given(st.floats(0.1, 1e4))
def test_a_server_is_asked_once_for_blocks_in_a_row(rate: float) -> None:
    """However the sum of its parts is rounded; two sessions with it would share the connection that one gives up."""
    server = Reachable("a", range(0, 6), 0.0, rate)
    assert best_chain([server], range(6)) == [Hop(server, range(6))]


def test_the_blocks_nobody_serves_are_named() -> None:
    servers = [Reachable("a", range(0, 2), 0, 1), Reachable("b", range(5, 6), 0, 1)]
    with pytest.raises(SwarmError, match=r"has blocks 2 to 4, 6: start one with"):
        best_chain(servers, range(7))
    with pytest.raises(SwarmError, match="a range of layers, not"):
        best_chain(servers, range(3, 3))


@pytest.mark.parametrize(
    ("blocks", "ping_s", "throughput"),
    [
        (range(3, 3), 0.0, 1.0),
        (range(0, 4, 2), 0.0, 1.0),
        (range(-1, 2), 0.0, 1.0),
        (range(2), -1.0, 1.0),
        (range(2), float("nan"), 1.0),
        (range(2), 0.0, 0.0),
        (range(2), 0.0, float("inf")),
    ],
)
def test_a_record_that_no_server_has_is_refused(blocks: range, ping_s: float, throughput: float) -> None:
    with pytest.raises(SwarmError, match="server odd: "):
        Reachable("odd", blocks, ping_s, throughput)
