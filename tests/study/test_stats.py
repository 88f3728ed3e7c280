from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.study.stats import (
    FEW,
    FEWEST,
    MANY,
    AxisStatistic,
    Interval,
    bootstrap,
    median_ratio,
    paired_bootstrap,
    ratio_of_means,
    ratio_of_medians,
    share,
    share_below,
)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_an_interval_is_finite_and_ordered_and_a_drawn_one_within_the_data(values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interval = bootstrap(values, resamples=100)
    slack = 1e-9 * (1 + max(map(abs, values)))
    assert interval.low <= interval.estimate + slack and interval.estimate - slack <= interval.high
    if not FEWEST <= len(values) < FEW:
        assert min(values) - slack <= interval.low and interval.high <= max(values) + slack
    assert interval.n == len(values)


@pytest.mark.parametrize(("values", "estimate"), [([2.5], 2.5), ([3, 3, 3], 3.0)])
def test_one_value_or_a_constant_has_no_width(values: list[float], estimate: float) -> None:
    assert bootstrap(values) == Interval(estimate, estimate, estimate, len(values))


@pytest.mark.parametrize(("stat", "function"), [("mean", np.mean), ("median", np.median)])
def test_it_agrees_with_scipy(stat: str, function) -> None:
    values = np.random.default_rng(1).exponential(size=60)
    mine = bootstrap(values, stat=stat, resamples=4000)
    theirs = scipy.stats.bootstrap(
        (values,), function, n_resamples=4000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert mine.estimate == pytest.approx(function(values))
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), rel=0.03)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        interval = bootstrap(rng.normal(size=40), resamples=300, seed=trial)
        hits += interval.low <= 0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_seed_decides() -> None:
    values = list(range(10))
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert bootstrap(values, seed=3) != bootstrap(values, seed=4)


def test_columns_of_an_observation_stay_together() -> None:
    # Loss is 2 a token in every document: the ratio of sums has no spread, whatever is drawn.
    tokens = np.arange(1.0, 9.0)
    interval = bootstrap(np.stack([2 * tokens, tokens], axis=1), stat=lambda x: x[:, 0].sum() / x[:, 1].sum())
    assert (interval.estimate, interval.low, interval.high, interval.n) == (2.0, 2.0, 2.0, 8)


def test_many_resamples_at_once_give_what_one_after_the_other_gives() -> None:
    pairs = np.random.default_rng(3).uniform(1, 2, (9, 2))
    together = AxisStatistic(lambda sample, axis: np.divide(*np.moveaxis(np.percentile(sample, 95, axis=axis), -1, 0)))
    one = bootstrap(pairs, lambda sample: float(np.divide(*np.percentile(sample, 95, axis=0))), resamples=50)
    assert bootstrap(pairs, together, resamples=50) == one
    assert bootstrap(pairs[:3], together) == bootstrap(pairs[:3], lambda sample: together(sample))


def test_pairing_removes_what_the_pairs_share() -> None:
    shared = np.random.default_rng(0).normal(scale=100, size=30)
    interval = paired_bootstrap(shared + 1, shared)
    assert (interval.low, interval.high) == pytest.approx((1, 1))
    with pytest.raises(ValueError, match="one length"):
        paired_bootstrap([1, 2], [1])


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_nothing_and_nan_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap(values)


def test_an_unknown_statistic_and_a_summary() -> None:
    with pytest.raises(ValueError, match="unknown statistic 'mode'"):
        bootstrap([1, 2], stat="mode")
    summary = Interval(0.5, 0.25, 0.75, 4).summary("%", scale=100)
    assert summary == {"value": 50, "low": 25, "high": 75, "n": 4, "unit": "%", "range": True}
    assert "range" not in Interval(0.5, 0.25, 0.75, FEWEST).summary()


def test_of_five_to_nine_the_mean_has_students_interval() -> None:
    values = [3.0, 1.0, 2.0, 5.0, 4.0, 9.0]
    half = scipy.stats.t.ppf(0.975, 5) * np.std(values, ddof=1) / 6**0.5
    found = bootstrap(values)
    assert (found.low, found.high) == pytest.approx((4 - half, 4 + half), rel=1e-3)


def test_few_normal_observations_cover_the_truth_as_often_as_is_said() -> None:
    """The percentile bootstrap of five covers it in 82 of 100 cases."""
    rng = np.random.default_rng(1)
    found = [bootstrap(rng.normal(size=5)) for _ in range(400)]
    assert 0.92 <= np.mean([one.low <= 0 <= one.high for one in found]) <= 0.98


@pytest.mark.parametrize(("n", "ends"), [(6, (0, 5)), (8, (0, 7)), (9, (1, 7))])
def test_of_six_to_nine_the_median_has_order_statistics(n: int, ends: tuple[int, int]) -> None:
    assert bootstrap(list(range(n)), "median") == Interval((n - 1) / 2, *map(float, ends), n)
    outside = 2 * scipy.stats.binom.cdf(ends[0], n, 0.5)
    assert 1 - outside >= 0.95 > 1 - 2 * scipy.stats.binom.cdf(ends[0] + 1, n, 0.5)


def test_booleans_are_a_share() -> None:
    assert bootstrap([True] * 5) == share(5, 5)
    assert share(5, 5).low == pytest.approx(0.478, abs=1e-3)


def test_rounds_are_paired_as_they_ran() -> None:
    assert median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == Interval(3.0, 2.0, 4.0, 3)
    with pytest.raises(ValueError, match="paired as they ran, so 2 and 1"):
        median_ratio([1.0, 2.0], [1.0])


def test_the_share_by_which_one_mean_is_below_another() -> None:
    assert share_below([1.0, 2.0, 3.0], [4.0, 8.0, 12.0]) == Interval(0.75, 0.75, 0.75, 3)
    assert share_below([1.0, 3.0], [2.0, 3.0]) == Interval(1 - 4 / 5, 0.0, 0.5, 2)


def test_a_ratio_of_means_resamples_both_of_a_draw() -> None:
    assert ratio_of_means([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == Interval(2.0, 2.0, 2.0, 3)
    assert ratio_of_means([2.0, 3.0], [1.0, 3.0]) == Interval(5 / 4, 1.0, 2.0, 2)
    with pytest.raises(ValueError, match="dimensions"):
        ratio_of_means([1.0, 2.0], [1.0])


def test_of_fewer_than_five_the_range_is_told() -> None:
    assert bootstrap([3.0, 1.0, 2.0], "median") == Interval(2.0, 1.0, 3.0, 3)
    ratio = bootstrap([[2.0, 1.0], [9.0, 3.0]], lambda x: x[:, 0].sum() / x[:, 1].sum())
    assert ratio == Interval(11 / 4, 2.0, 3.0, 2)


@given(st.integers(1, 200), st.data())
@settings(max_examples=50, deadline=None)
def test_a_share_has_scipys_exact_interval(n: int, data) -> None:
    count = data.draw(st.integers(0, n))
    mine, theirs = share(count, n), scipy.stats.binomtest(count, n).proportion_ci(method="exact")
    assert mine.estimate == count / n and mine.low < mine.high
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_a_share_of_very_many_is_that_of_the_normal_distribution() -> None:
    count, n = MANY + 1, 5 * MANY
    mine, theirs = share(count, n), scipy.stats.binomtest(count, n).proportion_ci(method="exact")
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=0.005 * (theirs.high - theirs.low))
    assert share(1_649_614, 2_453_667_840).high < 0.000674


@pytest.mark.parametrize(("count", "n"), [(2, 1), (-1, 3), (0, 0)])
def test_what_is_no_share_is_refused(count: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{count} of {n} is no share"):
        share(count, n)


def test_independent_samples_have_the_ratio_of_their_medians() -> None:
    assert ratio_of_medians([4.0, 6.0, 8.0], [2.0, 3.0]) == Interval(6 / 2.5, 4 / 3, 8 / 2, 2)
