"""The choice is the best by its own model, keeps the bound, and has the right limits."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.droidspeak.group_selection import (
    Choice,
    Conditions,
    GroupCosts,
    GroupLoss,
    LinkEstimate,
    choose_group,
    slo_rule,
)
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.schedule import ReuseRequest, Schedule, simulate
from firsttoken.study.errors import RequestError

DEPTH = 10
COSTS = GroupCosts(
    DEPTH, layer_s=0.01, layer_token_s=1e-5, first_token_s=0.005, kv_token_bytes=800, e_cache_token_bytes=1200
)
NOW = Conditions(tokens=1000, bytes_per_s=1e8, latency_s=0.001)
GROUPS = st.tuples(st.integers(0, DEPTH), st.integers(0, DEPTH)).map(lambda ends: Group(*sorted(ends)))
CANDIDATES = st.lists(st.builds(GroupLoss, GROUPS, st.floats(-0.1, 1)), min_size=1, max_size=8)
RATES = st.floats(1e3, 1e12)
LOADS = st.floats(1, 50)
FULL = Group(0, DEPTH)


@given(group=GROUPS, units=st.tuples(*[st.integers(1, 5)] * 3), schedule=st.sampled_from(Schedule))
def test_one_request_alone_costs_what_the_simulator_says(group: Group, units: tuple, schedule: Schedule) -> None:
    kv, edge, compute = units
    costs = GroupCosts(DEPTH, compute, 0, 0, kv, edge)
    timeline = simulate([ReuseRequest("A", 0, DEPTH, group, kv, edge, compute)], schedule)
    assert costs.ttft_s(group, Conditions(1, 1.0), schedule) == timeline.ttft["A"]


@given(group=GROUPS, rate=RATES, load=LOADS, latency=st.floats(0, 1))
def test_pipelined_lies_between_its_floor_and_the_unpipelined(
    group: Group, rate: float, load: float, latency: float
) -> None:
    now = Conditions(1000, rate, latency, load)
    sent = (DEPTH - len(group)) * COSTS.kv_token_bytes + group.needs_e_cache * COSTS.e_cache_token_bytes
    compute = COSTS.compute_s(group, now)
    floor = max(now.transfer_s(1000 * sent), compute + load * COSTS.first_token_s)
    pipelined = COSTS.ttft_s(group, now)
    assert floor <= pipelined * (1 + 1e-9)
    assert pipelined <= COSTS.ttft_s(group, now, Schedule.SEND_REUSED) * (1 + 1e-9)
    assert COSTS.ttft_s(group, now, Schedule.SEND_REUSED) <= COSTS.ttft_s(group, now, Schedule.SEND_ALL)


def test_a_lower_group_hides_the_pass_behind_the_prefix() -> None:
    """The pass waits for layer 9 only: the other nine have been passed by when it comes."""
    costs = GroupCosts(DEPTH, 0.0, 0.0, first_token_s=1.0, kv_token_bytes=1, e_cache_token_bytes=1)
    assert costs.ttft_s(Group(0, 9), Conditions(1, 0.5)) == pytest.approx(2.1)
    assert costs.ttft_s(Group(0, 9), Conditions(1, 0.5), Schedule.SEND_REUSED) == pytest.approx(3.0)


def test_tokens_and_load_count() -> None:
    assert COSTS.compute_s(Group(2, 5), replace(NOW, load=2)) == pytest.approx(2 * 3 * (0.01 + 0.01))
    assert COSTS.ttft_s(FULL, NOW) == pytest.approx(COSTS.ttft_s(Group(3, 4), NOW, Schedule.RECOMPUTE))


@given(candidates=CANDIDATES, rate=RATES, load=LOADS, bound=st.floats(0, 1))
def test_no_candidate_within_the_bound_is_better(candidates, rate, load, bound) -> None:
    now = replace(NOW, bytes_per_s=rate, load=load)
    choice = choose_group(candidates, COSTS, now, bound)
    assert choice.loss <= bound
    assert choice.group == FULL or GroupLoss(choice.group, choice.loss) in candidates
    assert choice.ttft_s <= COSTS.ttft_s(FULL, now, Schedule.RECOMPUTE)
    for candidate in candidates:
        expected = COSTS.ttft_s(candidate.group, now)
        if candidate.loss <= bound:
            assert (choice.ttft_s, choice.loss) <= (expected, candidate.loss)


@given(candidates=CANDIDATES, bound=st.floats(0, 1))
def test_an_endless_bandwidth_takes_the_least_computation(candidates, bound: float) -> None:
    now = Conditions(1000, inf)
    choice = choose_group(candidates, COSTS, now, bound)
    within = [len(c.group) for c in candidates if c.loss <= bound]
    assert len(choice.group) == min([DEPTH, *within])


@given(candidates=CANDIDATES, load=LOADS)
def test_without_a_bandwidth_it_is_a_full_prefill(candidates, load: float) -> None:
    for rate in (0.0, 1e-6):
        assert choose_group(candidates, COSTS, Conditions(1000, rate, load=load), 1).group == FULL


class TestSloRule:
    candidates = (
        GroupLoss(Group(0, 2), 0.09),
        GroupLoss(Group(0, 4), 0.04),
        GroupLoss(Group(2, 6), 0.03),
        GroupLoss(Group(0, 8), 0.01),
    )

    def pick(self, queue_empty: bool, slo_s: float, bound: float = 0.05) -> Choice:
        now = Conditions(1000, inf)  # 0.02 s a layer
        return slo_rule(queue_empty, self.candidates, COSTS, now, slo_s=slo_s, loss_bound=bound)

    def test_a_queue_takes_the_fewest_layers_within_the_bound(self) -> None:
        assert (self.pick(False, 9.0).group, self.pick(False, 9.0).loss) == (Group(2, 6), 0.03)
        assert self.pick(False, 9.0, bound=0.1).group == Group(0, 2)
        assert self.pick(False, 9.0, bound=0.0).group == FULL

    def test_no_queue_takes_the_most_layers_that_meet_the_slo(self) -> None:
        assert self.pick(True, 9.0).group == FULL
        assert self.pick(True, 0.17).group == Group(0, 8)
        assert self.pick(True, 0.1).group == Group(2, 6)

    def test_an_slo_that_none_meets_takes_the_fastest_within_the_bound(self) -> None:
        assert self.pick(True, 0.001).group == Group(2, 6)


class TestLinkEstimate:
    seen = st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-3, 1e3)), min_size=1, max_size=20)

    @given(seen)
    def test_lies_among_the_rates_seen(self, seen) -> None:
        link = LinkEstimate(5.0)
        for nbytes, seconds in seen:
            link.observe(nbytes, seconds)
        rates = [nbytes / seconds for nbytes, seconds in seen]
        assert min(rates) * (1 - 1e-9) <= link.bytes_per_s <= max(rates) * (1 + 1e-9)

    def test_is_the_mean_of_time_not_of_rates_and_forgets(self) -> None:
        link = LinkEstimate(7.0)
        assert link.bytes_per_s == 7.0
        link.observe(100, 1.0)
        link.observe(100, 10.0)
        assert link.bytes_per_s == pytest.approx(150 / 10.5)
        for _ in range(40):
            link.observe(100, 0.5)
        assert link.bytes_per_s == pytest.approx(200)

    def test_refuses_what_is_no_transfer(self) -> None:
        for nbytes, seconds in [(0, 1.0), (1, 0.0), (-1, 1.0), (1, nan), (1, inf)]:
            with pytest.raises(RequestError, match="a transfer of"):
                LinkEstimate(1.0).observe(nbytes, seconds)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tokens": 0}, "1 token or more, not 0"),
        ({"bytes_per_s": -1}, "0 bytes/s or more, not -1"),
        ({"bytes_per_s": nan}, "0 bytes/s or more, not nan"),
        ({"latency_s": -0.1}, "latency is 0 s or more, not -0.1"),
        ({"load": 0.5}, "1 or more, not 0.5"),
    ],
)
def test_conditions_out_of_range_are_refused(changed: dict, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        replace(NOW, **changed)


def test_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestError, match="does not fit 10 layers"):
        COSTS.ttft_s(Group(0, 11), NOW)


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(RequestError, match="profile the pair first"):
        choose_group([], COSTS, NOW, 0.05)
    for loss, bound in [(nan, 0.05), (0.1, -1.0), (0.1, nan)]:
        with pytest.raises(RequestError, match="losses must be numbers and the bound 0 or more"):
            choose_group([GroupLoss(Group(0, 2), loss)], COSTS, NOW, bound)
