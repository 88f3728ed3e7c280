from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.cps.policies import make_policy
from firsttoken.cps.policies.online import OnlineCrossPoint
from firsttoken.cps.policies.replay import draw_noise, replay
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.fitted import FittedCosts
from firsttoken.engine.preemption import Action, Observation
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken_studies.cps.assumed_costs import Drift, ScaledCosts

COUNT, SECONDS = 300, 30.0
A6000 = PublishedCosts(decode_s=0.03)
COALESCED = FittedCosts(4.3e-3, 8e-6, 9e-10, 0, 0, 0, 1.5e-4, 6e-7, 1.5e-4, 6e-7)
LOADED = [(5.0 * turn, ScaledCosts(A6000, compute=1 + turn % 2)) for turn in range(6)]
SETTINGS: dict[str, Callable[[float], Costs]] = {
    "published": lambda now_s: A6000,
    "coalesced": lambda now_s: COALESCED,
    "slow link": lambda now_s: ScaledCosts(A6000, swap=4),
    "link slows": Drift([(0, A6000), (15, ScaledCosts(A6000, swap=4))]).at,
    "link gets faster": Drift([(0, A6000), (15, ScaledCosts(A6000, swap=1 / 8))]).at,
    "model grows": Drift([(0, A6000), (15, ScaledCosts(A6000, compute=3))]).at,
    "load comes and goes": Drift(LOADED).at,
}


def load(seed: int, spread: float = 0.1):
    """Preemptions with lengths like those of ShareGPT, and as many ordinary prefills of half the length."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(6.5, 0.75, (2, COUNT))), 128, 2048).astype(int)
    times = np.sort(rng.random((2, COUNT)) * SECONDS)
    factors = rng.lognormal(0, spread, COUNT)
    prefills = [(at, int(n) // 2, by) for at, n, by in zip(times[1], lengths[1], factors, strict=True)]
    return lengths[0].tolist(), times[0].tolist(), draw_noise(COUNT, spread, seed), prefills


def total(policy, costs_at, lengths, times, noise, prefills) -> float:
    return sum(row["seconds"] for row in replay(policy, lengths, times, costs_at, noise, prefills))


def regret(rows) -> float:
    """What was lost by choices, as a share of the best expected cost."""
    best = sum(min(row["swap_s"], row["recompute_s"]) for row in rows)
    return sum(row[f"{row['action']}_s"] for row in rows) / best - 1


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("free_prefills", [True, False])
def test_it_follows_whatever_happens(name: str, free_prefills: bool) -> None:
    totals = {}
    for seed in range(2):
        *given, prefills = load(seed)
        given.append(prefills if free_prefills else [])
        policies = {key: make_policy(key) for key in ("swap", "recompute", "cross_point", "online")}
        policies["oracle"] = make_policy("oracle", costs_at=SETTINGS[name])
        for key, policy in policies.items():
            totals[key] = totals.get(key, 0.0) + total(policy, SETTINGS[name], *given)
    online, oracle = totals.pop("online"), totals.pop("oracle")
    # over 20 seeds the means are at most 1.03 and 1.04 with prefills, 1.07 and 1.08 without
    assert online <= (1.05 if free_prefills else 1.10) * min(totals.values())
    assert online <= (1.07 if free_prefills else 1.12) * oracle
    if name != "published":
        assert online < totals["cross_point"]


def test_a_first_swap_that_pays_for_setting_up_does_not_shut_swap_out() -> None:
    lengths, times, noise, prefills = load(0)
    noise[:3, 0] *= 20
    rows = replay(OnlineCrossPoint(), lengths, times, SETTINGS["published"], noise, prefills)
    assert regret(rows[100:]) < 0.01


def test_a_link_that_was_busy_for_a_moment_is_used_again() -> None:
    busy = Drift([(0, A6000), (10, ScaledCosts(A6000, swap=50)), (11, A6000)]).at
    lengths, times, noise, prefills = load(0)
    rows = replay(OnlineCrossPoint(), lengths, times, busy, noise, prefills)
    during = [row["action"] for row in rows if 10.5 < row["at_s"] < 11]
    assert during.count("recompute") >= len(during) - 1
    assert regret([row for row in rows if row["at_s"] > 20]) < 0.02


Step = tuple[Action | None, int, float]
STEPS = st.lists(
    st.tuples(st.sampled_from([None, None, Action.SWAP, Action.RECOMPUTE]), st.integers(1, 10_000), st.floats(0, 100)),
    max_size=120,
)


@given(STEPS, st.sampled_from([0.0, 0.02, 0.3]), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_the_budget_is_kept_whatever_is_seen(steps: list[Step], explore: float, every: int) -> None:
    """Choices (None) and observations in any order, with any delay and any cost."""
    policy = OnlineCrossPoint(explore=explore, every=every)
    for action, tokens, seconds in steps:
        explored = policy.explorations
        if action is None:
            assert policy.choose(tokens, 0.0) in Action
        else:
            policy.observe(Observation(action, tokens, seconds, 0.0))
        assert policy.explored_s <= explore * policy.recovered_s
        assert policy.explorations - explored in (0, 1)
    assert policy.explorations <= sum(action is None for action, *_ in steps) // every + 1


def test_an_unknown_way_is_tried_once_and_again_when_no_answer_comes() -> None:
    policy = OnlineCrossPoint()
    assert [policy.choose(500, 0.0) for _ in range(3)] == ["swap", "recompute", "swap"]
    policy = OnlineCrossPoint()
    policy.observe(Observation(Action.RECOMPUTE, 500, 0.01, 0.0))
    chosen = [policy.choose(500, 0.0) for _ in range(70)]
    assert [place + 1 for place, action in enumerate(chosen) if action is Action.SWAP] == [1, 4, 16, 64]
    assert policy.explorations == 0 and policy.predict(Action.SWAP, 500) == 0


def test_prefills_that_shared_a_step_are_one() -> None:
    policy, costs = OnlineCrossPoint(), PublishedCosts(decode_s=0.03)
    policy.observe(Observation(Action.SWAP, 1500, costs.swap_s(1500), 0.0))
    lengths = np.random.default_rng(0).integers(64, 512, (40, 4))
    now_s = 0.0
    for prompts in lengths.tolist():
        step_s = costs.step_s([(0, tokens) for tokens in prompts], [])
        now_s += step_s
        for place, tokens in enumerate(prompts):  # a live engine tells of them one after the other
            policy.observe(Observation(Action.RECOMPUTE, tokens, step_s * tokens / sum(prompts), now_s + 1e-6 * place))
    policy.choose(500, now_s)
    for tokens in (128, 300, 800):  # shares alone would make them 1.5, 3.4 and 8.8 ms instead of 5.3, 6.6 and 10.6
        assert policy.predict(Action.RECOMPUTE, tokens) == pytest.approx(costs.recompute_s(tokens), rel=0.1)
