"""Means, percentiles and percentile-bootstrap intervals (Efron and Tibshirani, 1993, chapter 13).

The bootstrap is written in numpy because summaries are made where the experiment runs, and a GPU machine may have
no scipy; the tests hold it against ``scipy.stats.bootstrap``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Statistic = str | Callable[[np.ndarray], float]

_NAMED = {"mean": np.mean, "median": np.median}
FEWEST = 5  # observations for a bootstrap: draws from fewer repeat a handful of values
_DRAWS_AT_ONCE = 1_000_000  # drawn indices held in memory, 8 bytes each


@dataclass(frozen=True)
class Along:
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
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile-bootstrap interval of ``stat`` over the first axis of ``values`` [n] or [n, columns].

    ``stat`` is "mean", "median", a function of one resample or :class:`Along`; the columns of an observation stay
    together, so a ratio of sums (perplexity from [loss, tokens]) is resampled correctly. Fewer than ``FEWEST``
    observations give the range of ``stat`` over each alone, one or a constant sample low = high = estimate. Raises
    ValueError for no values, a value that is not finite, or an unknown name.
    """
    sample = np.asarray(values, dtype=float)
    if sample.ndim == 0 or len(sample) == 0 or not np.isfinite(sample).all():
        raise ValueError("bootstrap needs at least one value, and finite values only")
    if isinstance(stat, str) and stat not in _NAMED:
        raise ValueError(f"unknown statistic {stat!r}; known: {', '.join(_NAMED)}, or a function")
    function = _NAMED[stat] if isinstance(stat, str) else stat
    estimate, n = float(function(sample)), len(sample)
    if (sample == sample[0]).all():
        return Interval(estimate, estimate, estimate, n)
    if n < FEWEST:
        alone = [float(function(sample[index : index + 1])) for index in range(n)]
        return Interval(estimate, min(alone), max(alone), n)
    draws = _resampled(sample, stat, resamples, np.random.default_rng(seed))
    low, high = np.percentile(draws, [50 * (1 - level), 50 * (1 + level)])
    return Interval(estimate, float(low), float(high), n)


def paired_bootstrap(a: Sequence[float], b: Sequence[float], **options: Any) -> Interval:
    """Interval of the mean of a - b, where a[i] and b[i] are the same item under two treatments.

    ``options`` are those of ``bootstrap``. Raises ValueError when the lengths differ.
    """
    if len(a) != len(b):
        raise ValueError(f"paired samples must have one length, not {len(a)} and {len(b)}")
    return bootstrap(np.asarray(a, dtype=float) - np.asarray(b, dtype=float), **options)


def wilson(count: int, n: int, z: float = 1.96) -> Interval:
    """The share ``count`` of ``n`` with Wilson's score interval (1927), which has a width where all or none count.

    Raises ValueError for a count that is none of ``n``.
    """
    if not 0 <= count <= n or n < 1:
        raise ValueError(f"{count} of {n} is no share")
    share, weight = count / n, z * z / n
    middle = (share + weight / 2) / (1 + weight)
    half = z * (share * (1 - share) / n + weight / (4 * n)) ** 0.5 / (1 + weight)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half), n)


def percentile(values: Sequence[float] | np.ndarray, q: float) -> float:
    """The ``q``-th percentile (0 to 100), linearly interpolated between observations."""
    return float(np.percentile(np.asarray(values, dtype=float), q))


def _resampled(sample: np.ndarray, stat: Statistic, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """``stat`` of each of ``resamples`` draws with replacement, in batches that bound the memory."""
    n, draws = len(sample), []
    batch = max(1, _DRAWS_AT_ONCE // sample.size)
    for start in range(0, resamples, batch):
        picked = sample[rng.integers(0, n, size=(min(batch, resamples - start), n))]
        if isinstance(stat, str) and sample.ndim == 1:
            draws.extend(_NAMED[stat](picked, axis=1))
        elif isinstance(stat, Along):
            draws.extend(stat.function(picked, 1))
        else:
            function = _NAMED[stat] if isinstance(stat, str) else stat
            draws.extend(float(function(resample)) for resample in picked)
    return np.asarray(draws)


def ratio_of_medians(over: Sequence[float], under: Sequence[float]) -> Interval:
    """The ratio of medians, its observations drawn independently of each other."""
    rng = np.random.default_rng(0)
    count = min(len(over), len(under))
    pairs = np.column_stack([rng.permutation(over)[:count], rng.permutation(under)[:count]])
    return bootstrap(pairs, lambda sample: float(np.divide(*np.median(sample, axis=0))))
