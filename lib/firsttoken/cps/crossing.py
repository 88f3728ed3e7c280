"""The length where swap and recompute cost the same (CPS, 3.3 and Figure 1): how sure it is, whether there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.study.errors import CorpusError

Samples = Sequence[tuple[int, float]]  # (tokens, seconds), any number of observations at each length
RESAMPLES = 2000


@dataclass(frozen=True)
class Crossing:
    """The first length at which the cheaper way changes, among the lengths measured.

    ``tokens`` is None where one way is cheaper at all of them. ``below`` is the cheaper way under it ("swap" or
    "recompute"; a tie is swap's, as in the paper's rule), ``changes`` how often the cheaper way changes at all: more
    than once means noise, or costs for which one threshold is the wrong rule.
    """

    tokens: float | None
    below: str
    changes: int

    @property
    def verdict(self) -> str:
        """The verdict: "swap always", "recompute always", "swap up to 927 tokens" or "recompute up to ..."."""
        return f"{self.below} always" if self.tokens is None else f"{self.below} up to {self.tokens:.0f} tokens"


@dataclass(frozen=True)
class CrossingInterval:
    """A crossing with its 95 % bounds over the resamples that have one; ``without`` is the share that has none."""

    crossing: Crossing
    low: float | None
    high: float | None
    without: float
    n: int


def crossing(
    tokens: Sequence[float], swap_s: Sequence[float], recompute_s: Sequence[float], log2: bool = False
) -> Crossing:
    """Find where two curves through measured points cross; the points [n] must increase in ``tokens``.

    Between points both are straight, over tokens or (``log2``) over their logarithm, as one reads a figure with such an
    axis: Table 2 gives 927 and 897. Raises CorpusError for fewer than two points or lengths out of order.
    """
    lengths = np.asarray(tokens, dtype=float)
    if len(lengths) < 2 or (np.diff(lengths) <= 0).any():
        raise CorpusError(f"a crossing lies between two or more lengths in increasing order, not in {list(tokens)}")
    extra = np.asarray(swap_s, dtype=float) - np.asarray(recompute_s, dtype=float)
    swap = extra <= 0
    turns = np.flatnonzero(swap[1:] != swap[:-1])
    below = "swap" if swap[0] else "recompute"
    if not len(turns):
        return Crossing(None, below, 0)
    axis, turn = np.log2(lengths) if log2 else lengths, turns[0]
    position = axis[turn] + (axis[turn + 1] - axis[turn]) * extra[turn] / (extra[turn] - extra[turn + 1])
    return Crossing(float(2**position if log2 else position), below, len(turns))


def fit_crossing(tokens: Sequence[float], swap_s: Sequence[float], recompute_s: Sequence[float]) -> Crossing:
    """Find where straight lines through both cross, within the lengths measured; lengths may repeat.

    Points are weighted by 1/seconds, since what is noisy is the relative error. Raises CorpusError for one length only.
    """
    lengths = np.asarray(tokens, dtype=float)
    if len(set(lengths.tolist())) < 2:
        raise CorpusError(f"a line needs two or more lengths, not {sorted(set(lengths.tolist()))}; measure more")
    range_tokens = [lengths.min(), lengths.max()]
    measured_s = [np.asarray(seconds, dtype=float) for seconds in (swap_s, recompute_s)]
    return crossing(
        range_tokens,
        *(np.polyval(np.polyfit(lengths, seconds, 1, w=1 / seconds), range_tokens) for seconds in measured_s),
    )


def crossing_interval(swap: Samples, recompute: Samples) -> CrossingInterval:
    """The crossing of the medians at each length, with a percentile bootstrap over the observations at each length.

    The bounds come from the resamples that cross; where many do not, ``without`` says so, and the bounds alone would
    mislead. Raises CorpusError unless both were measured at the same lengths.
    """
    lengths = sorted({tokens for tokens, _ in swap})
    if lengths != sorted({tokens for tokens, _ in recompute}):
        raise CorpusError("swap and recompute were not measured at the same lengths; measure both at each")
    rng = np.random.default_rng(0)
    grouped = [
        [np.array([s for n, s in samples if n == length]) for length in lengths] for samples in (swap, recompute)
    ]
    estimate = crossing(lengths, *([float(np.median(group)) for group in way] for way in grouped))
    medians = [
        np.stack([np.median(group[rng.integers(0, len(group), (RESAMPLES, len(group)))], axis=1) for group in way], 1)
        for way in grouped
    ]
    crossings = [crossing(lengths, out, back).tokens for out, back in zip(*medians, strict=True)]
    bounded = [crossing_tokens for crossing_tokens in crossings if crossing_tokens is not None]
    low, high = np.percentile(bounded, [2.5, 97.5]).tolist() if bounded else (None, None)
    return CrossingInterval(estimate, low, high, 1 - len(bounded) / RESAMPLES, len(swap) + len(recompute))
