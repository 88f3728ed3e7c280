from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.cps.policies import POLICIES, make_policy
from firsttoken.engine.preemption import Action, Observation
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError, RequestError
from firsttoken_studies.cps.assumed_costs import Drift, ScaledCosts

LENGTHS = st.integers(1, 100_000)
PAPER = {"bytes_per_token": 12_288, "bytes_per_s": 25e9, "flop_per_token": 0.72e9, "flop_per_s": 155e12}


@given(LENGTHS)
def test_static_policies_ignore_the_length(tokens: int) -> None:
    assert make_policy("swap").choose(tokens, 0.0) is Action.SWAP
    assert make_policy("recompute").choose(tokens, 0.0) is Action.RECOMPUTE
    # the theory has no cross-point: one answer for all lengths
    assert make_policy("bandwidth_only", **PAPER).choose(tokens, 0.0) is Action.SWAP
    assert make_policy("bandwidth_only", **PAPER | {"bytes_per_s": 5e9}).choose(tokens, 0.0) is Action.RECOMPUTE


def test_the_paper_s_threshold_swaps_up_to_and_with_1024() -> None:
    policy = make_policy("cross_point")
    assert [policy.choose(tokens, 0.0) for tokens in (1023, 1024, 1025)] == ["swap", "swap", "recompute"]
    assert make_policy("cross_point", threshold=10).choose(11, 0.0) is Action.RECOMPUTE


def test_the_oracle_knows_the_costs_of_the_moment() -> None:
    costs = PublishedCosts(decode_s=0.03)
    oracle = make_policy("oracle", costs_at=Drift([(0, costs), (10, ScaledCosts(costs, swap=1 / 8))]).at)
    assert [oracle.choose(tokens, 0.0) for tokens in (927, 928)] == ["swap", "recompute"]
    assert oracle.choose(928, 10.0) is Action.SWAP


def test_every_policy_says_its_name_and_may_be_told_of_costs() -> None:
    costs = PublishedCosts(0.03)
    given = {"bandwidth_only": PAPER, "oracle": {"costs_at": lambda now_s: costs}, "both_ends": {"costs": costs}}
    for name, policy in POLICIES.items():
        made = make_policy(name, **given.get(name, {}))
        assert type(made) is policy and made.name == name
        made.observe(Observation(Action.SWAP, 16, 1e-3, 0.0))


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("crosspoint", {}, r"no preemption policy 'crosspoint'; known: .*did you mean 'cross_point'"),
        ("cross_point", {"treshold": 1}, r"cross_point: unknown parameter 'treshold'; known: threshold"),
        ("swap", {"threshold": 1}, r"swap: unknown parameter 'threshold'; known: none"),
        ("oracle", {}, r"oracle: missing parameter 'costs_at'"),
        ("cross_point", {"threshold": -1}, "threshold must be 0 tokens or more"),
        ("bandwidth_only", PAPER | {"flop_per_s": 0}, "flop_per_s must be above 0"),
        ("online", {"memory": 1}, "memory above 1"),
    ],
)
def test_what_is_unknown_or_impossible_is_named(name: str, parameters: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        make_policy(name, **parameters)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_no_observation_without_tokens_or_with_odd_seconds(tokens: int, seconds: float) -> None:
    with pytest.raises(RequestError, match="observation"):
        Observation(Action.SWAP, tokens, seconds, 0.0)
