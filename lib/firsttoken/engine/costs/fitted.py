"""Costs fitted to what an engine was seen to do: linear in what a step consists of, and in the tokens of a swap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.engine.costs.cost_model import Costs, step_parts
from firsttoken.study.errors import CorpusError


@dataclass(frozen=True)
class StepSample:
    """One step as it was measured; ``prefills`` and ``contexts`` as in ``Costs.step_s``."""

    prefills: Sequence[tuple[int, int]]
    contexts: Sequence[int]
    seconds: float


@dataclass(frozen=True)
class SwapSample:
    """One recovery by swap as it was measured."""

    tokens: int
    out_s: float
    in_s: float


@dataclass(frozen=True)
class FittedCosts(Costs):
    """Prices in seconds: of a step, a prefill token, an attention pair of a prefill, a decoding request, a token of its
    context and a token of padding up to the longest context; and a fixed one and one a token for each way of a swap."""

    step: float
    prefill_token: float
    pair: float
    request: float
    context_token: float
    padded_token: float
    out_fixed: float
    out_token: float
    in_fixed: float
    in_token: float

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        if not prefills and not contexts:
            return 0.0
        prices = (self.step, self.prefill_token, self.pair, self.request, self.context_token, self.padded_token)
        return float(np.dot(step_parts(prefills, contexts), prices))

    def swap_out_s(self, tokens: int) -> float:
        return self.out_fixed + self.out_token * tokens

    def swap_in_s(self, tokens: int) -> float:
        return self.in_fixed + self.in_token * tokens


def fit_costs(steps: Sequence[StepSample], swaps: Sequence[SwapSample]) -> FittedCosts:
    """Fit prices that are 0 or more with the least squared relative error.

    Raises CorpusError for fewer than 6 steps or 2 swaps, or seconds that are not above 0.
    """
    if len(steps) < 6 or len(swaps) < 2:
        raise CorpusError(f"costs: {len(steps)} steps and {len(swaps)} swaps seen; a fit needs at least 6 and 2")
    tokens = [[1.0, sample.tokens] for sample in swaps]
    return FittedCosts(
        *relative_fit([step_parts(sample.prefills, sample.contexts) for sample in steps], [s.seconds for s in steps]),
        *relative_fit(tokens, [sample.out_s for sample in swaps]),
        *relative_fit(tokens, [sample.in_s for sample in swaps]),
    )


def relative_fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> np.ndarray:
    """Non-negative prices [k] for ``rows`` [n, k] with the least sum of ((predicted - measured) / measured)²."""
    measured = np.asarray(seconds, dtype=float)
    if not (measured > 0).all():
        raise CorpusError("costs: a step or swap was seen to take no time; check the clock that measured it")
    return non_negative(np.asarray(rows, dtype=float) / measured[:, None], np.ones(len(measured)))


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients, as a cost has no negative part (scipy stays optional).

    Returns x >= 0 [k] that minimises ``|matrix x - target|``, for ``matrix`` [n, k] and ``target`` [n].

    The active set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23) on columns of length
    one; a column of zeros gets 0.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    columns, size = matrix / lengths, matrix.shape[1]
    x, free = np.zeros(size), np.zeros(size, dtype=bool)
    tolerance = 1e-10 * max(float(np.linalg.norm(target)), np.finfo(float).tiny)
    for _ in range(3 * size):  # a bound for rounding alone, which can free and bind the same column for ever
        gradient = np.where(free, -np.inf, columns.T @ (target - columns @ x))
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            wanted = np.zeros(size)
            wanted[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            negative = np.flatnonzero(free & (wanted <= 0))
            if not len(negative):
                break
            shares = x[negative] / np.maximum(x[negative] - wanted[negative], np.finfo(float).tiny)
            x = np.maximum(x + shares.min() * (wanted - x), 0.0)
            free[negative[shares.argmin()]] = False
            x[~free] = 0.0
        x = wanted
    return x / lengths
