"""Arrival times: sorted, at the rate that was asked for, and as uneven."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.engine.workload_items import Arrivals, Item, with_arrivals
from firsttoken.study.errors import RequestError

COUNT = 4001
rates, cvs, seeds = st.floats(0.01, 1000), st.floats(0.1, 4), st.integers(0, 2**32 - 1)


def test_all_at_once_is_the_default():
    items = [Item(5.0, n, 1) for n in (3, 1, 2)]
    assert with_arrivals(items, Arrivals()) == tuple(Item(0.0, n, 1) for n in (3, 1, 2))
    assert with_arrivals([], Arrivals(rate_per_s=2)) == ()


@given(rates, cvs, seeds, st.integers(0, 50))
def test_times_are_sorted_start_at_zero_and_follow_the_seed(rate, cv, seed, count):
    items = [Item(0.0, index + 1, 1) for index in range(count)]
    arrived = with_arrivals(items, Arrivals(rate, cv, seed))
    times = [item.arrival_s for item in arrived]
    assert times == sorted(times)
    assert times[:1] == [0.0] * min(count, 1)
    assert [item.prompt_tokens for item in arrived] == [item.prompt_tokens for item in items]
    assert arrived == with_arrivals(items, Arrivals(rate, cv, seed))


@given(rates, cvs, seeds)
def test_the_mean_rate_is_the_one_asked_for(rate, cv, seed):
    mean_gap = Arrivals(rate, cv, seed).times_s(COUNT)[-1] / (COUNT - 1)
    # the standard error of a mean of n gaps is cv / sqrt(n) of it; hypothesis does not find one beyond six of them
    assert mean_gap * rate == pytest.approx(1, abs=6 * cv / math.sqrt(COUNT - 1))


@pytest.mark.parametrize("cv", [0.25, 0.5, 1.0, 2.0])
def test_the_gaps_are_as_uneven_as_asked(cv):
    gaps = np.diff(Arrivals(5.0, cv, seed=3).times_s(20_001))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_cv_of_one_is_a_poisson_process():
    from scipy import stats

    times = Arrivals(rate_per_s=8.0, seed=11).times_s(COUNT)
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 8)).pvalue > 0.05
    bursts = np.diff(Arrivals(8.0, cv=2.0, seed=11).times_s(COUNT))
    assert stats.kstest(bursts, "expon", args=(0, 1 / 8)).pvalue < 1e-6


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_rates_that_are_none(rate):
    with pytest.raises(RequestError, match=r"rate_per_s must be above 0 \(inf for all at once\)"):
        Arrivals(rate)


@pytest.mark.parametrize("cv", [0, -1, math.nan, math.inf])
def test_cvs_that_are_none(cv):
    with pytest.raises(RequestError, match=r"cv must be above 0 and finite \(1 for Poisson\)"):
        Arrivals(1.0, cv)


def test_a_cv_without_a_rate():
    with pytest.raises(RequestError, match="no gaps for cv 2; give a rate_per_s"):
        Arrivals(cv=2)
