from __future__ import annotations

import numpy as np
import pytest
from listening import Listening

from firsttoken.cps.policies import make_policy
from firsttoken.cps.policies.replay import draw_noise, replay
from firsttoken.engine.preemption import Action
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import RequestError
from firsttoken_studies.cps.assumed_costs import Drift, ScaledCosts

COSTS = PublishedCosts(decode_s=0.03)


def test_costs_follow_choice_time_and_noise() -> None:
    at = Drift([(0, COSTS), (2, ScaledCosts(COSTS, swap=4))]).at
    noise = np.array([[1.5, 9.0], [2.0, 9.0]])
    first, second = replay(make_policy("swap"), [512, 700], [1.0, 2.0], at, noise)
    assert first["seconds"] == pytest.approx(1.5 * COSTS.swap_s(512))
    assert second["seconds"] == pytest.approx(2 * 4 * COSTS.swap_s(700))
    assert (second["swap_s"], second["recompute_s"]) == (4 * COSTS.swap_s(700), COSTS.recompute_s(700))
    assert (second["at_s"], second["tokens"], second["action"]) == (2.0, 700, "swap")
    (other, _) = replay(make_policy("recompute"), [512, 700], [1.0, 2.0], at, noise)
    assert other["seconds"] == pytest.approx(9 * COSTS.recompute_s(512))


def test_ordinary_prefills_are_told_in_time_and_cost_nothing() -> None:
    policy = Listening(lambda tokens: Action.SWAP)
    prefills = [(5.0, 100, 1.0), (0.5, 200, 2.0), (1.5, 300, 1.0)]
    rows = replay(policy, [512, 512], [1.0, 2.0], lambda now_s: COSTS, np.ones((2, 2)), prefills)
    assert [(seen.action, seen.tokens, seen.now_s) for seen in policy.seen] == [
        ("recompute", 200, 0.5),
        ("swap", 512, 1.0),
        ("recompute", 300, 1.5),
        ("swap", 512, 2.0),
    ]
    assert policy.seen[0].seconds == pytest.approx(2 * COSTS.recompute_s(200))
    assert sum(row["seconds"] for row in rows) == pytest.approx(2 * COSTS.swap_s(512))


def test_noise_is_relative_seeded_and_unbiased() -> None:
    noise = draw_noise(20_000, 0.3, seed=1)
    assert noise.shape == (20_000, 2) and (noise > 0).all()
    assert noise.mean(0) == pytest.approx([1, 1], abs=0.02)
    assert np.log(noise).std(0) == pytest.approx([0.3, 0.3], rel=0.03)
    assert (noise == draw_noise(20_000, 0.3, seed=1)).all()
    assert (draw_noise(3, 0.0, seed=1) == 1).all()


def test_lists_must_match() -> None:
    with pytest.raises(RequestError, match="2 lengths, 1 times, 2 of noise"):
        replay(make_policy("swap"), [1, 2], [0.0], lambda now_s: COSTS, np.ones((2, 2)))
