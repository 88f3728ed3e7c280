"""Joins, leaves and deaths: gaps are filled within a period, the dead are forgotten, nobody follows another's move."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.petals.placement import Rebalancing, most_rate
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb52_chains_and_offloading.swarm_churn import Churn, ChurnConfig

CONFIG = ChurnConfig(depth=10, period_s=60, expiry_s=20)


def grown(config: ChurnConfig, counts: list[int], seed: int = 0) -> Churn:
    """A swarm of servers of ``counts`` blocks that came ten seconds apart."""
    churn = Churn(config, seed)
    for number, count in enumerate(counts):
        churn.join(f"s{number:02}", count, 1.0 * count)
        churn.run(churn.now_s + 10)
    return churn


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    counts=st.lists(st.integers(3, 8), min_size=5, max_size=7),
    gone=st.integers(0, 6),
    says_so=st.booleans(),
)
def test_no_block_stays_unserved_beyond_a_period(seed: int, counts: list[int], gone: int, says_so: bool) -> None:
    """A period to ask, an expiry for those who do not say that they go, and the move itself."""
    churn = grown(CONFIG, counts, seed)
    churn.run(churn.now_s + 2 * CONFIG.period_s)
    assert churn.history[-1][3] == 0
    churn.leave(f"s{gone % len(counts):02}", says_so=says_so)
    if sum(len(one.blocks) for one in churn.living) >= 2 * CONFIG.depth:
        wait = CONFIG.period_s + CONFIG.expiry_s + CONFIG.gossip_s + CONFIG.settle_s + CONFIG.load_s
        churn.run(churn.now_s + wait)
        assert churn.history[-1][3] == 0


def test_a_dead_server_is_seen_until_its_record_expires_and_never_after() -> None:
    churn = grown(CONFIG, [10, 10])
    churn.leave("s00", says_so=False)
    assert {one.name for one in churn.seen()} == {"s00", "s01"}, "a ghost"
    churn.run(churn.now_s + CONFIG.expiry_s)
    assert {one.name for one in churn.seen()} == {"s01"}
    churn.leave("s01", says_so=True)
    churn.run(churn.now_s + CONFIG.gossip_s)
    assert churn.seen() == []


def lone_gap(settle_s: float) -> Churn:
    """Six servers on the first half, none on the second, all asking within a tenth of a second: one move is enough."""
    churn = Churn(ChurnConfig(depth=10, period_s=60, gossip_s=1.0, settle_s=settle_s, rule=Rebalancing(0.5)))
    churn.join("z", 5, 5.0)
    for number in range(6):
        churn.join(f"s{number}", 5, 5.0)
    for server in churn._servers.values():
        server.serves, server.record = True, type(server.record)(server.record.name, range(0, 5), 0.0, 5.0)
        server.said, server.wants = [(-10.0, server.record)], None
    churn._agenda.clear()
    for number, name in enumerate(churn._servers):
        churn._after(0.01 * number, lambda name=name: churn._check(name))
    return churn


def test_two_never_move_for_one_gap() -> None:
    """Who announces and waits for longer than news travel yields to whoever was earlier; who does not goes in vain."""
    rash, calm = lone_gap(0.0), lone_gap(2.0)
    for churn in (rash, calm):
        churn.run(30)
    assert rash.moves > calm.moves >= 1 and rash.in_vain > 0
    assert calm.in_vain == 0 and calm.history[-1][3] == 0


def test_two_that_come_at_once_share_what_is_needed() -> None:
    churn = Churn(CONFIG)
    for name in "ab":
        churn.join(name, 5, 5.0)
    churn.run(CONFIG.settle_s + CONFIG.load_s)
    assert {one.blocks for one in churn.living} == {range(0, 5), range(5, 10)} and churn.history[-1][3] == 0


def test_the_rate_is_never_above_what_the_living_could_have() -> None:
    churn = grown(CONFIG, [3, 4, 5, 6, 7])
    churn.run(500)
    assert all(rate <= most * (1 + 1e-9) for _, rate, most, _ in churn.history)
    assert churn.history[-1][2] == pytest.approx(most_rate(churn.living, 10))


@pytest.mark.parametrize(
    "bad",
    [{"depth": 0}, {"period_s": 0.0}, {"expiry_s": -1.0}, {"gossip_s": -1.0}, {"load_s": -1.0}, {"load_s": 200.0}],
)
def test_impossible_times_are_refused(bad: dict) -> None:
    with pytest.raises(ProfileError, match="churn: "):
        ChurnConfig(**({"depth": 4} | bad))
