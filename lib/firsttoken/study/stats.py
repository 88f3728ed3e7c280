"""Estimates with 95 % intervals: of ten observations or more by the percentile bootstrap (Efron and Tibshirani, 1993,
chapter 13), of fewer by Student's t or by order statistics, of shares exactly (Clopper and Pearson, 1934).

The percentile bootstrap of five normal observations covers the mean in 82 of 100 cases instead of 95, and that of a
share of which all or none count has no width, however few they are. All is written in numpy because summaries are made
where the experiment runs, and a GPU machine may have no scipy; the tests hold it against scipy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Statistic = str | Callable[[np.ndarray], float]

_NAMED = {"mean": np.mean, "median": np.median}
FEWEST = 5  # observations for an interval; of fewer the range is given
FEW = 10  # observations for a bootstrap: draws from fewer repeat a handful of values
MANY = 100_000  # of what counts and of what does not: both intervals then agree in three digits of their width
_STUDENT = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}  # 97.5th percentile of Student's t by degrees of freedom
_DRAWS_AT_ONCE = 1_000_000  # drawn indices held in memory, 8 bytes each


@dataclass(frozen=True)
class AxisStatistic:
    """A statistic of many resamples at once: ``function(array, axis)`` reduces the axis of the observations.

    One resample after the other, the percentiles of a recorded cold start took 13 s.
    """

    function: Callable[[np.ndarray, int], np.ndarray]

    def __call__(self, sample: np.ndarray) -> float:
        """The statistic of one sample [n] or [n, columns]."""
        return float(self.function(sample, 0))


@dataclass(frozen=True)
class Interval:
    """An estimate from ``n`` observations with the bounds of its confidence interval, which of fewer than
    ``FEWEST`` is their range and is called so."""

    estimate: float
    low: float
    high: float
    n: int

    def summary(self, unit: str = "", scale: float = 1.0) -> dict[str, Any]:
        """The entry that ``Result.summary`` holds, multiplied by ``scale`` (100 for per cent)."""
        bounds = {"value": self.estimate * scale, "low": self.low * scale, "high": self.high * scale}
        called = {"range": True} if self.n < FEWEST and self.low != self.high else {}
        return bounds | {"n": self.n, "unit": unit} | called


def bootstrap(
    values: Sequence[float] | np.ndarray,
    stat: Statistic = "mean",
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The interval of ``stat`` over the first axis of ``values`` [n] or [n, columns].

    ``stat`` is "mean", "median", a function of one resample or :class:`AxisStatistic`. The columns of an observation
    stay together, so a ratio of sums (perplexity from [loss, tokens]) is resampled correctly. The mean of booleans is a
    share, whose interval is exact (:func:`share`). Of fewer than ``FEW`` observations the 95 % interval of the median
    is that of the order statistics, and of every other statistic Student's t on the jackknife's pseudo-values, which
    for the mean are the observations. Fewer than ``FEWEST`` observations give the range of ``stat`` over each alone,
    one or a constant sample low = high = estimate. Raises ValueError for no values, a value that is not finite, or an
    unknown name.
    """
    sample = np.asarray(values)
    if sample.dtype == bool and sample.ndim == 1 and stat == "mean" and len(sample):
        return share(int(sample.sum()), len(sample))
    sample = sample.astype(float)
    if sample.ndim == 0 or len(sample) == 0 or not np.isfinite(sample).all():
        raise ValueError("bootstrap needs at least one value, and finite values only")
    if isinstance(stat, str) and stat not in _NAMED:
        raise ValueError(f"unknown statistic {stat!r}; known: {', '.join(_NAMED)}, or a function")
    function = _NAMED[stat] if isinstance(stat, str) else stat
    estimate, n = float(function(sample)), len(sample)
    if (sample == sample[0]).all():
        return Interval(estimate, estimate, estimate, n)
    if n < FEWEST or (n == FEWEST and stat == "median"):  # the range of five holds the median in 94 of 100 cases
        alone = [float(function(sample[index : index + 1])) for index in range(n)]
        return Interval(estimate, min(alone), max(alone), n)
    if n < FEW:
        return _ordered(sample, estimate) if stat == "median" and sample.ndim == 1 else _student(sample, function)
    draws = _resampled(sample, stat, resamples, np.random.default_rng(seed))
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(estimate, float(low), float(high), n)


def _ordered(sample: np.ndarray, median: float) -> Interval:
    """The median of 6 to 9 values with the narrowest pair of them that holds it in 95 of 100 cases."""
    ordered, n = np.sort(sample), len(sample)
    left_out = 1 if n == 9 else 0  # the second of nine lies above the median in 2.0 of 100 cases, of eight in 3.5
    return Interval(median, float(ordered[left_out]), float(ordered[n - 1 - left_out]), n)


def _student(sample: np.ndarray, function: Callable[[np.ndarray], float]) -> Interval:
    """Student's t on the jackknife's pseudo-values n f(all) - (n - 1) f(all but one) (Tukey, 1958)."""
    n, estimate = len(sample), float(function(sample))
    without = np.array([float(function(np.delete(sample, index, axis=0))) for index in range(n)])
    half = _STUDENT[n - 1] * math.sqrt((n * estimate - (n - 1) * without).var(ddof=1) / n)
    return Interval(estimate, estimate - half, estimate + half, n)


def share(count: int, n: int) -> Interval:
    """The share ``count`` of ``n`` with its exact 95 % interval (Clopper and Pearson, 1934), which has a width where
    all or none count; of more than ``MANY`` either way, by the normal distribution.

    Raises ValueError for a count that is none of ``n``.
    """
    if not 0 <= count <= n or n < 1:
        raise ValueError(f"{count} of {n} is no share")
    if min(count, n - count) > MANY:
        half = 1.96 * math.sqrt(count * (n - count) / n) / n
        return Interval(count / n, count / n - half, count / n + half, n)
    return Interval(count / n, 1 - _highest(n - count, n), _highest(count, n), n)


def _highest(count: int, n: int) -> float:
    """The end of the interval above ``count`` of ``n``, from those that do not count where that is less to add up."""
    if count == n:
        return 1.0
    return _share_at(count, n, 0.025) if count <= MANY else 1 - _share_at(n - count - 1, n, 0.975)


def _share_at(count: int, n: int, cases: float) -> float:
    """The share p for which ``count`` or fewer of ``n`` count in this share of ``cases``, by bisection to 2**-50."""
    upto = np.arange(count + 1)
    ways = np.concatenate([[0.0], np.cumsum(np.log(n - upto[:-1]) - np.log(upto[1:]))])
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        tail = float(np.exp(ways + upto * math.log(middle) + (n - upto) * math.log1p(-middle)).sum())
        low, high = (middle, high) if tail > cases else (low, middle)
    return (low + high) / 2


def paired_bootstrap(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Interval of the mean of a - b, where a[i] and b[i] are the same item under two treatments.

    Raises ValueError when the lengths differ.
    """
    if len(a) != len(b):
        raise ValueError(f"paired samples must have one length, not {len(a)} and {len(b)}")
    return bootstrap(np.asarray(a, dtype=float) - np.asarray(b, dtype=float))


def _resampled(sample: np.ndarray, stat: Statistic, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """``stat`` of each of ``resamples`` draws with replacement, in batches that bound the memory."""
    n, draws = len(sample), []
    batch = max(1, _DRAWS_AT_ONCE // sample.size)
    for start in range(0, resamples, batch):
        picked = sample[rng.integers(0, n, size=(min(batch, resamples - start), n))]
        if isinstance(stat, str) and sample.ndim == 1:
            draws.extend(_NAMED[stat](picked, axis=1))
        elif isinstance(stat, AxisStatistic):
            draws.extend(stat.function(picked, 1))
        else:
            function = _NAMED[stat] if isinstance(stat, str) else stat
            draws.extend(float(function(resample)) for resample in picked)
    return np.asarray(draws)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The median of ``numerator[i] / under[i]``, where both were measured in round i.

    Raises ValueError when the lengths differ.
    """
    if len(numerator) != len(denominator):
        raise ValueError(
            f"rounds are paired as they ran, so {len(numerator)} and {len(denominator)} measurements make no pairs"
        )
    return bootstrap(np.divide(numerator, denominator), "median")


def ratio_of_means(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The mean of ``numerator`` over the mean of ``denominator``, where numerator[i] and denominator[i] are of one
    draw: draws are resampled, each with both its values. Raises ValueError when the lengths differ."""
    return bootstrap(np.column_stack([numerator, denominator]), lambda sample: float(np.divide(*sample.mean(0))))


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The ratio of the medians of two independent samples of positive values.

    Its interval reaches from the lower end of one median over the upper end of the other to the reverse, which holds
    the ratio at least as often as both intervals hold their medians.
    """
    above, below = bootstrap(numerator, "median"), bootstrap(denominator, "median")
    n = min(above.n, below.n)
    return Interval(above.estimate / below.estimate, above.low / below.high, above.high / below.low, n)


def share_below(sample: Sequence[float], other: Sequence[float]) -> Interval:
    """The share by which the mean of ``sample`` lies below that of ``other``, drawn as by :func:`ratio_of_means`."""
    return bootstrap(np.column_stack([sample, other]), lambda pairs: float(1 - np.divide(*pairs.mean(0))))
