from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from firsttoken.engine.costs.fitted import FittedCosts, StepSample, SwapSample, fit_costs
from firsttoken.study.errors import CorpusError

KNOWN = FittedCosts(
    step=4e-3,
    prefill_token=8e-6,
    pair=1e-9,
    request=2e-4,
    context_token=3e-8,
    padded_token=5e-8,
    out_fixed=1e-4,
    out_token=6e-6,
    in_fixed=2e-4,
    in_token=7e-6,
)


def samples(spread: float = 0.0, count: int = 200) -> tuple[list[StepSample], list[SwapSample]]:
    """Steps and swaps as an engine sees them: prefills alone, decodes alone, both; cached prefixes too."""
    rng = np.random.default_rng(0)
    steps, swaps = [], []
    for number in range(count):
        prefills = [(int(rng.integers(0, 4000)), int(rng.integers(1, 2000))) for _ in range(number % 3)]
        contexts = [int(n) for n in rng.integers(1, 4000, 1 + number % 7)] if number % 4 else []
        if prefills or contexts:
            steps.append(StepSample(prefills, contexts, KNOWN.step_s(prefills, contexts) * rng.lognormal(0, spread)))
        tokens = int(rng.integers(16, 8000))
        out_s, in_s = (way * rng.lognormal(0, spread) for way in (KNOWN.swap_out_s(tokens), KNOWN.swap_in_s(tokens)))
        swaps.append(SwapSample(tokens, out_s, in_s))
    return steps, swaps


def test_known_prices_come_back() -> None:
    assert asdict(fit_costs(*samples())) == pytest.approx(asdict(KNOWN), rel=1e-6)


def test_noise_leaves_the_predictions() -> None:
    steps, swaps = samples(spread=0.05)
    costs = fit_costs(steps, swaps)
    assert all(price >= 0 for price in asdict(costs).values())
    assert costs.recompute_s(1024) == pytest.approx(KNOWN.recompute_s(1024), rel=0.03)
    assert costs.swap_s(1024) == pytest.approx(KNOWN.swap_s(1024), rel=0.03)


def test_a_price_that_nothing_speaks_for_is_zero() -> None:
    steps, swaps = samples()
    alone = [replace(sample, contexts=[], seconds=1e-3) for sample in steps if sample.prefills]
    costs = fit_costs(alone, swaps)
    assert (costs.request, costs.context_token, costs.padded_token) == (0, 0, 0)
    assert costs.step_s([(0, 10)], []) == pytest.approx(1e-3)


def test_an_empty_step_is_free_and_padding_pays_for_the_longest() -> None:
    assert KNOWN.step_s([], []) == 0
    padded = KNOWN.step_s([], [10, 1000]) - KNOWN.step_s([], [505, 505])
    assert padded == pytest.approx(KNOWN.padded_token * 2 * (1000 - 505))


def test_too_little_or_no_time_is_refused() -> None:
    steps, swaps = samples()
    with pytest.raises(CorpusError, match="5 steps and 1 swaps"):
        fit_costs(steps[:5], swaps[:1])
    with pytest.raises(CorpusError, match="no time"):
        fit_costs([replace(steps[0], seconds=0.0), *steps], swaps)
