"""The paper's arithmetic, and clients that wait for each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.petals.routing import Hop, Reachable, chain_s
from firsttoken.study.errors import ProfileError
from firsttoken_studies.petals.chain_costs import (
    BLOOM_BYTES,
    BLOOM_HIDDEN,
    NETWORKS,
    OFFLOADING_GBIT_PER_S,
    Network,
    clients_step_s,
    crossover_bytes,
    offload_s,
    published_compute_s,
    swarm_s,
)


def test_offloading_is_bytes_over_a_link() -> None:
    seconds = [offload_s(BLOOM_BYTES, gbit) for gbit in OFFLOADING_GBIT_PER_S.values()]
    assert seconds == [5.5, 11.0, 22.0]


def test_a_step_is_computing_and_its_round_trips() -> None:
    assert swarm_s(0.5, 3, 64, Network(1.0, 0.1)) == pytest.approx(0.8, abs=1e-5)
    slow = Network(8e-9, 0.0)  # one byte a second
    assert swarm_s(0.0, 1, 64, slow, tokens=2) == pytest.approx(2 * 2 * 68), "64 codes and a scale, there and back"
    assert 0.5 < published_compute_s() < 1 / 1.71


def test_at_the_crossover_both_take_as_long() -> None:
    network = NETWORKS["100 Mbit/s, 100 ms"]
    size = crossover_bytes(256.0, 3, BLOOM_HIDDEN, network)
    assert offload_s(size, 256.0) == pytest.approx(swarm_s(0.0, 3, BLOOM_HIDDEN, network))


def chain(*servers: tuple[float, float]) -> list[Hop]:
    """A server of one block for each (ping, seconds in it)."""
    return [
        Hop(Reachable(f"s{n}", range(n, n + 1), ping, 1 / busy), range(n, n + 1))
        for n, (ping, busy) in enumerate(servers)
    ]


@settings(max_examples=60, deadline=None)
@given(
    servers=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1]), st.sampled_from([0.01, 0.05, 0.3])), min_size=1, max_size=5
    ),
    clients=st.integers(1, 6),
)
def test_clients_wait_no_less_than_the_slowest_server_makes_them(servers: list, clients: int) -> None:
    hops = chain(*servers)
    alone, together, more = (clients_step_s(hops, count) for count in (1, clients, clients + 1))
    assert alone == pytest.approx(chain_s(hops))
    slowest = clients * max(busy for _, busy in servers)
    assert max(alone, slowest) * (1 - 1e-9) <= together <= min(more, clients * alone) * (1 + 1e-9)


def test_two_clients_of_one_server_wait_for_each_other_half_of_the_time() -> None:
    """Way and step as long: whoever arrives meets the other in the server with probability 1 / 2."""
    assert clients_step_s(chain((1.0, 1.0)), 2) == pytest.approx(2.5)
    assert clients_step_s(chain((0.0, 1.0)), 5) == pytest.approx(5.0)


def test_no_network_is_refused() -> None:
    for gbit, rtt in ((0.0, 0.1), (1.0, -1.0), (float("nan"), 0.0)):
        with pytest.raises(ProfileError, match="a rate and a latency"):
            Network(gbit, rtt)
