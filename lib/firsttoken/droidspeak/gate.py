"""A quality gate: trust the reused cache for this request, or fall back to full prefill.

The signal comes from ``probes``; larger is worse. The threshold is set on one set of requests and its errors are
counted on another. A request has failed where the reused cache gave a worse answer than full prefill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from firsttoken.study.errors import RequestError
from firsttoken.study.stats import Interval

_ROUNDING = 1e-12  # 1 - 7 / 10 is a little more than 0.3, and keeps to a budget of 0.3


@dataclass(frozen=True)
class Gate:
    """Accepts a request whose ``signal`` (a name, for the record) is at most ``threshold``."""

    signal: str
    threshold: float

    def accepts(self, value: float) -> bool:
        """Return whether the reused cache may be used; never for a signal that is not a number."""
        return value <= self.threshold


@dataclass(frozen=True)
class GateRates:
    """The errors of a gate on ``n`` requests, as shares of 0 to 1.

    ``miss``: of the failed ones, those accepted; ``false_alarm``: of the good ones, those that fell back. None where
    there is no such request.
    """

    miss: float | None
    false_alarm: float | None
    fallback_share: float
    failed: int
    n: int


@dataclass(frozen=True)
class RocPoint:
    """A gate at ``threshold``: the share of failed requests ``caught``, and the ``false_alarm`` share of good ones."""

    threshold: float
    false_alarm: float
    caught: float


def calibrate(
    signals: Sequence[float],
    failed: Sequence[bool],
    *,
    signal: str,
    miss_budget: float,
) -> Gate:
    """Return the gate for ``signal`` that falls back least among those that miss at most the share ``miss_budget`` (0
    to 1) of the failed ones of these requests.

    Its threshold is one of ``signals``, or just below all of them (then it accepts none). Raises RequestError for
    another budget, and as ``roc``.
    """
    if not 0 <= miss_budget <= 1:
        raise RequestError(f"miss_budget is a share from 0 to 1, not {miss_budget}")
    within = (point for point in roc(signals, failed) if 1 - point.caught <= miss_budget + _ROUNDING)
    return Gate(signal, next(within).threshold)


def rates(gate: Gate, signals: Sequence[float], failed: Sequence[bool]) -> GateRates:
    """Return the error rates of ``gate`` on these requests. Raises RequestError for none, or for unequal lengths."""
    values, bad = _arrays(signals, failed)
    fallen = ~(values <= gate.threshold)
    miss = float((~fallen[bad]).mean()) if bad.any() else None
    false_alarm = float(fallen[~bad].mean()) if (~bad).any() else None
    return GateRates(miss, false_alarm, float(fallen.mean()), int(bad.sum()), len(bad))


def roc(signals: Sequence[float], failed: Sequence[bool]) -> list[RocPoint]:
    """Every gate that these requests tell apart, from the one that accepts all to the one that accepts none.

    Raises RequestError unless both failed and good requests are there, with finite signals.
    """
    values, bad = _arrays(signals, failed)
    if not np.isfinite(values).all():
        raise RequestError("a signal is NaN or infinite, so the probe failed there; leave that request out")
    if bad.all() or not bad.any():
        raise RequestError(f"all {len(bad)} requests {'failed' if bad.all() else 'are good'}; a gate needs both kinds")
    thresholds = np.unique(values)[::-1]
    thresholds = np.append(thresholds, np.nextafter(thresholds[-1], -np.inf))  # finite, because JSON knows no infinity
    kinds = [np.sort(values[bad]), np.sort(values[~bad])]
    caught, alarms = (1 - np.searchsorted(kind, thresholds, side="right") / len(kind) for kind in kinds)
    return [RocPoint(*map(float, point)) for point in zip(thresholds, alarms, caught, strict=True)]


def auc(points: Sequence[RocPoint]) -> float:
    """Area under ``roc``: how often a failed request has a larger signal than a good one, ties counting half."""
    return math.fsum(
        (after.false_alarm - before.false_alarm) * (after.caught + before.caught) / 2
        for before, after in pairwise(points)
    )


def auc_interval(signals: Sequence[float], failed: Sequence[bool], resamples: int = 2000, seed: int = 0) -> Interval:
    """``auc`` of these requests with its 95 % bootstrap interval: failed and good ones are drawn again each among
    themselves, so that few failures stay as few. Raises as ``roc``."""
    values, bad = _arrays(signals, failed)
    area, rng = auc(roc(signals, failed)), np.random.default_rng(seed)
    wins = (values[bad][:, None] > values[~bad]) + 0.5 * (values[bad][:, None] == values[~bad])
    resampled = [wins[np.ix_(*(rng.integers(0, n, n) for n in wins.shape))].mean() for _ in range(resamples)]
    return Interval(area, *map(float, np.percentile(resampled, [2.5, 97.5])), len(values))


def _arrays(signals: Sequence[float], failed: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    values, bad = np.asarray(signals, dtype=float), np.asarray(failed, dtype=bool)
    if not len(values) or values.shape != bad.shape or values.ndim != 1:
        raise RequestError(f"{values.size} signals for {bad.size} requests; give one each, and at least one")
    return values, bad
