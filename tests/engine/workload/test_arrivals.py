"""Arrival times: sorted, at the rate that was asked for, a Poisson process."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.engine.workload_items import Arrivals, Item, with_arrivals
from firsttoken.study.errors import RequestError

COUNT = 4001
rates, seeds = st.floats(0.01, 1000), st.integers(0, 2**32 - 1)


def test_all_at_once_is_the_default():
    items = [Item(5.0, n, 1) for n in (3, 1, 2)]
    assert with_arrivals(items, Arrivals()) == tuple(Item(0.0, n, 1) for n in (3, 1, 2))
    assert with_arrivals([], Arrivals(rate_per_s=2)) == ()


@given(rates, seeds, st.integers(0, 50))
def test_times_are_sorted_start_at_zero_and_follow_the_seed(rate, seed, count):
    items = [Item(0.0, index + 1, 1) for index in range(count)]
    arrived = with_arrivals(items, Arrivals(rate, seed))
    times = [item.arrival_s for item in arrived]
    assert times == sorted(times)
    assert times[:1] == [0.0] * min(count, 1)
    assert [item.prompt_tokens for item in arrived] == [item.prompt_tokens for item in items]
    assert arrived == with_arrivals(items, Arrivals(rate, seed))


@given(rates, seeds)
def test_the_mean_rate_is_the_one_asked_for(rate, seed):
    mean_gap = Arrivals(rate, seed).times_s(COUNT)[-1] / (COUNT - 1)
    # the standard error of a mean of n gaps is 1 / sqrt(n) of it; hypothesis does not find one beyond six of them
    assert mean_gap * rate == pytest.approx(1, abs=6 / math.sqrt(COUNT - 1))


def test_arrivals_are_a_poisson_process():
    from scipy import stats

    times = Arrivals(rate_per_s=8.0, seed=11).times_s(COUNT)
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 8)).pvalue > 0.05


def test_bursts_come_at_the_same_rate_and_closer_together():
    from scipy import stats

    times = Arrivals(rate_per_s=8.0, seed=11, burstiness=0.25).times_s(COUNT)
    assert stats.kstest(np.diff(times), "gamma", args=(0.25, 0, 1 / 2)).pvalue > 0.05


@pytest.mark.parametrize("burstiness", [0, -1, math.nan, math.inf])
def test_burstiness_that_is_none(burstiness):
    with pytest.raises(RequestError, match="burstiness must be above 0"):
        Arrivals(1.0, burstiness=burstiness)


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_rates_that_are_none(rate):
    with pytest.raises(RequestError, match=r"rate_per_s must be above 0 \(inf for all at once\)"):
        Arrivals(rate)
