"""Draws of a token from a model's logits, by numpy alone: the same before torch is imported and after."""

from __future__ import annotations

import numpy as np


def draw(logits: np.ndarray, temperature: float, top_p: float, numbers: np.random.Generator) -> int:
    """Draw a token by ``logits`` [vocabulary], the largest of which is finite, at a ``temperature`` above 0.

    Only the nucleus is drawn from (Holtzman et al., ICLR 2020): the likeliest tokens, up to the one that makes up the
    share ``top_p`` together with those before it. A draw takes one of the ``numbers``, whatever the shares are.
    """
    shares = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        shares -= shares.max()  # never above 0, and in double: the smallest temperature leaves the largest alone
        shares /= float(temperature)
    np.exp(shares, out=shares)
    if top_p < 1:
        _cut(shares, top_p)
    sums = np.cumsum(shares, out=shares)
    # Below the last sum, as numbers are below 1; a token without a share ends where the one before it does.
    return int(sums.searchsorted(numbers.random() * sums[-1], side="right"))


def _cut(shares: np.ndarray, top_p: float) -> None:
    """Set ``shares`` [vocabulary] to 0 outside the nucleus, to which the first belong of those that are equal."""
    falling = np.sort(shares)[::-1]
    sums = falling.cumsum()
    kept = int(sums.searchsorted(top_p * sums[-1])) + 1
    least = falling[kept - 1]
    shares[shares < least] = 0.0
    equal = np.flatnonzero(shares == least)
    shares[equal[kept - int(np.count_nonzero(shares > least)) :]] = 0.0
