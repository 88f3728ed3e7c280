from __future__ import annotations

import pytest

from firsttoken.engine.costs.fitted import StepSample
from firsttoken.study.errors import CorpusError
from firsttoken_studies.nb36_throughput_under_load.study import DecodeCosts, TimedCosts, fit_decode

DECODE = DecodeCosts(step=2e-2, request=1e-3, context_token=1e-6)


def test_a_prefill_takes_what_was_timed_and_a_parabola_between() -> None:
    costs = TimedCosts((100, 200), (1.0, 3.0), DECODE)
    assert [costs.prefill_s(tokens) for tokens in (100, 150, 200, 400)] == pytest.approx([1.0, 1.875, 3.0, 6.0])
    assert costs.step_s([(0, 100), (0, 200)], []) == pytest.approx(4.0)
    assert costs.step_s([(100, 100)], []) == pytest.approx(2.0)
    assert costs.step_s([], []) == 0


def test_the_longer_of_loading_and_computing_counts() -> None:
    hidden, waiting = (TimedCosts((100,), (1.0,), DECODE, loaded_token=each) for each in (5e-3, 2e-2))
    assert hidden.prefill_s(100) == pytest.approx(1.0)
    assert waiting.prefill_s(100) == pytest.approx(2.0)


def test_a_request_alone_is_its_prefill_and_its_steps() -> None:
    costs = TimedCosts((100,), (1.0,), DECODE)
    assert costs.request_s(100, 1) == pytest.approx(1.0)
    assert costs.request_s(100, 3) == pytest.approx(1.0 + 2 * 2.1e-2 + 1e-6 * (100 + 101))


def test_decode_prices_come_back_from_their_own_steps() -> None:
    steps = [
        StepSample([], [context] * count, DECODE.step_s([context] * count))
        for count in (1, 4, 16)
        for context in (64, 512)
    ]
    found = fit_decode(steps)
    assert (found.step, found.request, found.context_token) == pytest.approx((2e-2, 1e-3, 1e-6))
    with pytest.raises(CorpusError, match="2 steps seen; a fit needs at least 3"):
        fit_decode(steps[:2])


@pytest.mark.parametrize("lengths", [(), (200, 100), (100, 100)])
def test_lengths_that_are_no_curve_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(CorpusError, match="timed once for each length"):
        TimedCosts(lengths, (1.0,) * len(lengths), DECODE)
