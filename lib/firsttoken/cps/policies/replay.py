"""One fixed sequence of preemptions under any policy: what its choices cost, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.preemption.preemption_policy import Action, Observation, PreemptionPolicy
from firsttoken.study.errors import RequestError


def draw_noise(count: int, spread: float, seed: int) -> np.ndarray:
    """Factors [count, 2] for swap and recompute: lognormal, of mean 1, ``spread`` their standard deviation in logs."""
    return np.random.default_rng(seed).lognormal(-(spread**2) / 2, spread, (count, 2))


def replay(
    policy: PreemptionPolicy,
    lengths: Sequence[int],
    times_s: Sequence[float],
    costs_at: Callable[[float], Costs],
    noise: np.ndarray,
    ordinary_prefills: Sequence[tuple[float, int, float]] = (),
) -> list[dict[str, Any]]:
    """Rows of what ``policy`` chose and paid for preemptions of ``lengths`` tokens [n] at ``times_s`` [n], increasing.

    ``noise`` [n, 2] holds the factors on the costs of swap and of recompute at each preemption, drawn before: all
    policies meet the same luck, and their totals differ by their choices alone. ``ordinary_prefills`` are (seconds,
    tokens, factor) of first prefills: the policy sees them, and they cost it nothing. A row has ``at_s``, ``tokens``,
    ``action``, ``seconds`` paid, and the expected ``swap_s`` and ``recompute_s``. Raises RequestError for lists that
    do not match.
    """
    if not len(lengths) == len(times_s) == len(noise):
        raise RequestError(f"replay: {len(lengths)} lengths, {len(times_s)} times, {len(noise)} of noise; give as many")
    prefills = sorted(ordinary_prefills)
    rows, observed = [], 0
    for tokens, at_s, factors in zip(lengths, times_s, noise, strict=True):
        while observed < len(prefills) and prefills[observed][0] <= at_s:
            when_s, new, factor = prefills[observed]
            policy.observe(Observation(Action.RECOMPUTE, new, costs_at(when_s).recompute_s(new) * factor, when_s))
            observed += 1
        costs = costs_at(at_s)
        expected = {Action.SWAP: costs.swap_s(tokens), Action.RECOMPUTE: costs.recompute_s(tokens)}
        action = policy.choose(tokens, at_s)
        seconds = expected[action] * float(factors[0 if action is Action.SWAP else 1])
        policy.observe(Observation(action, tokens, seconds, at_s))
        rows.append(
            {"at_s": at_s, "tokens": tokens, "action": str(action), "seconds": seconds}
            | {f"{way}_s": cost for way, cost in expected.items()}
        )
    return rows
