"""The gate: its threshold, its errors, and what falling back gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.gate import Gate, auc, auc_interval, calibrate, rates, roc
from firsttoken.study.errors import RequestError

SIGNALS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
FAILED = [False, False, True, False, True, True]

# few distinct values, so that ties are common
observed = st.lists(st.tuples(st.integers(-4, 4).map(lambda n: n / 3), st.booleans()), min_size=2, max_size=40)
both_kinds = observed.filter(lambda pairs: len({failed for _, failed in pairs}) == 2)


def test_no_miss_allowed():
    gate = calibrate(SIGNALS, FAILED, signal="doubt", miss_budget=0.0)
    assert gate == Gate("doubt", 0.2)
    found = rates(gate, SIGNALS, FAILED)
    assert (found.miss, found.false_alarm, found.fallback_share) == (0.0, pytest.approx(1 / 3), pytest.approx(4 / 6))
    assert (found.failed, found.n) == (3, 6)


def test_a_gate_at_its_threshold():
    gate = Gate("doubt", 0.4)
    assert gate.accepts(0.4) and not gate.accepts(0.41) and not gate.accepts(float("nan"))
    assert rates(gate, [float("nan"), 0.1], [False, False]).fallback_share == 0.5


def test_rates_say_none_where_a_kind_is_missing():
    found = rates(Gate("doubt", 0.5), [0.1, 0.9], [False, False])
    assert found.miss is None and found.false_alarm == 0.5


def test_every_threshold_can_be_written_down():
    thresholds = [point.threshold for point in roc(SIGNALS, FAILED)]
    assert json.loads(json.dumps(thresholds, allow_nan=False)) == thresholds


@settings(max_examples=50, deadline=None)
@given(both_kinds)
def test_an_area_lies_in_its_interval_whatever_is_drawn(pairs):
    signals, failed = zip(*pairs, strict=True)
    found = auc_interval(signals, failed, resamples=200)
    assert found.estimate == pytest.approx(auc(roc(signals, failed))) and found.n == len(pairs)
    assert 0 <= found.low <= found.high <= 1
    assert found.low - 0.25 <= found.estimate <= found.high + 0.25
    assert found == auc_interval(signals, failed, resamples=200), "a seed"


def test_few_failures_leave_the_area_open():
    few, many = ([rng > 0.6 for rng in np.linspace(0, 1, n)] for n in (6, 60))
    noisy = [np.sin(7.0 * np.arange(len(of))) + of for of in (few, many)]
    width = [found.high - found.low for found in map(auc_interval, noisy, (few, many))]
    assert width[0] > 1.5 * width[1] > 0
    sure = auc_interval([0.0, 0.1, 1.0, 1.1], [False, False, True, True])
    assert (sure.low, sure.estimate, sure.high) == (1, 1, 1)
    with pytest.raises(RequestError, match="a gate needs both kinds"):
        auc_interval([0.1, 0.2], [True, True])


@settings(max_examples=100, deadline=None)
@given(both_kinds, st.floats(0, 1))
def test_a_calibrated_gate_keeps_its_budget_and_wastes_none_of_it(pairs, budget):
    signals, failed = zip(*pairs, strict=True)
    every = [rates(Gate("x", t), signals, failed) for t in [*signals, min(signals) - 1]]
    careful = rates(calibrate(signals, failed, signal="x", miss_budget=budget), signals, failed)
    assert careful.miss <= budget + 1e-9
    assert careful.fallback_share == min(found.fallback_share for found in every if found.miss <= budget + 1e-12)


@settings(max_examples=100, deadline=None)
@given(both_kinds)
def test_roc_agrees_with_the_rates_and_auc_with_the_pairs(pairs):
    signals, failed = (np.array(column) for column in zip(*pairs, strict=True))
    points = roc(signals, failed)
    assert (points[0].false_alarm, points[0].caught) == (0, 0)
    assert (points[-1].false_alarm, points[-1].caught) == (1, 1)
    for point in points:
        found = rates(Gate("x", point.threshold), signals, failed)
        assert (point.false_alarm, 1 - point.caught) == pytest.approx((found.false_alarm, found.miss))
    bad, good = signals[failed][:, None], signals[~failed]
    assert auc(points) == pytest.approx(((bad > good) + 0.5 * (bad == good)).mean())


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan")])
def test_a_budget_that_is_no_share_is_refused(budget):
    with pytest.raises(RequestError, match="miss_budget is a share from 0 to 1"):
        calibrate(SIGNALS, FAILED, signal="doubt", miss_budget=budget)


@pytest.mark.parametrize(
    ("signals", "failed", "why"),
    [
        ([], [], "0 signals for 0 requests"),
        ([0.1, 0.2], [True], "2 signals for 1 requests"),
        ([0.1, float("nan")], [True, False], "NaN or infinite"),
        ([0.1, 0.2], [True, True], "all 2 requests failed"),
        ([0.1, 0.2], [False, False], "all 2 requests are good"),
    ],
)
def test_what_cannot_be_calibrated_on_is_refused(signals, failed, why):
    with pytest.raises(RequestError, match=why):
        calibrate(signals, failed, signal="doubt", miss_budget=0.1)
    with pytest.raises(RequestError, match=why):
        roc(signals, failed)
