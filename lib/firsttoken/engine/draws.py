"""Draws of a token from a model's logits, by numpy alone: the same before torch is imported and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from firsttoken.engine.request import Sampling

_BANNED = -1e300  # a logit that penalties, and a division by a temperature, leave a number


def choose(
    logits: np.ndarray, sampling: Sampling, tokens: Sequence[int], generated: int, numbers: np.random.Generator
) -> int:
    """Choose the token after ``tokens``, of which the last ``generated`` are the answer's so far, by ``logits``
    [vocabulary], as :func:`draw` or the first of the largest. The logits are adjusted before, as ``sampling`` says."""
    if sampling.adjusts:
        logits = _adjusted(logits, sampling, tokens, generated)
    if sampling.temperature == 0:
        return int(logits.argmax())
    return draw(logits, sampling.temperature, sampling.top_p, numbers, sampling.top_k, sampling.min_p)


def token_shares(logits: np.ndarray, sampling: Sampling, tokens: Sequence[int], generated: int) -> np.ndarray:
    """Return the probability [vocabulary] with which :func:`choose` draws each token."""
    logits = _adjusted(logits, sampling, tokens, generated) if sampling.adjusts else logits
    shares = shares_of(logits, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
    return shares / shares.sum()


def accept_draft(draft: int, drawn_from: np.ndarray, shares: np.ndarray, numbers: np.random.Generator) -> int:
    """Return ``draft``, a token that was ``drawn_from`` probabilities [vocabulary], or another in its place, so that
    what is returned is distributed by ``shares`` (Leviathan et al., 2.3)."""
    if numbers.random() * drawn_from[draft] < shares[draft]:
        return draft
    sums = np.cumsum(np.maximum(shares - drawn_from, 0.0))
    return int(sums.searchsorted(numbers.random() * sums[-1], side="right")) if sums[-1] > 0 else draft


def _adjusted(logits: np.ndarray, sampling: Sampling, tokens: Sequence[int], generated: int) -> np.ndarray:
    """``logits`` with what vLLM does to them before a draw, in its order: no end before ``min_tokens``, the bias, the
    penalty of repetition (of tokens in prompt or answer), and those of frequency and presence (of the answer's)."""
    values = logits.astype(np.float64)
    if generated < sampling.min_tokens:
        values[[token for token in sampling.stop if token < len(values)]] = _BANNED
    for token, bias in sampling.logit_bias:
        values[token] += bias
    if sampling.repetition_penalty != 1:
        present = np.unique(tokens)
        scores = values[present]
        values[present] = np.where(
            scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty
        )
    if generated and (sampling.frequency_penalty or sampling.presence_penalty):
        present, counts = np.unique(tokens[-generated:], return_counts=True)
        values[present] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return values


def draw(
    logits: np.ndarray,
    temperature: float,
    top_p: float,
    numbers: np.random.Generator,
    top_k: int = 0,
    min_p: float = 0.0,
) -> int:
    """Draw a token by ``logits`` [vocabulary], the largest of which is finite, at a ``temperature`` above 0.

    Tokens with less than ``min_p`` of the likeliest one's share are left out, then all but the ``top_k`` likeliest (0:
    none) and their equals. Of the others only the nucleus is drawn from (Holtzman et al., ICLR 2020): the likeliest
    tokens, up to the one that makes up the share ``top_p`` together with those before it. A draw takes one of the
    ``numbers``, whatever the shares are.
    """
    sums = np.cumsum(shares_of(logits, temperature, top_p, top_k, min_p))
    # Below the last sum, as numbers are below 1; a token without a share ends where the one before it does.
    return int(sums.searchsorted(numbers.random() * sums[-1], side="right"))


def shares_of(logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """Return what :func:`draw` draws from: a share for each token, whose sum need not be 1."""
    shares = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        shares -= shares.max()  # never above 0, and in double: the smallest temperature leaves the largest alone
        shares /= float(temperature)
    if 0 < top_k < len(shares):
        shares[shares < np.partition(shares, -top_k)[-top_k]] = -np.inf
    np.exp(shares, out=shares)
    shares[shares < min_p] = 0.0  # the likeliest token's is 1
    if top_p < 1:
        _cut(shares, top_p)
    return shares


def _cut(shares: np.ndarray, top_p: float) -> None:
    """Set ``shares`` [vocabulary] to 0 outside the nucleus, to which the first belong of those that are equal."""
    falling = np.sort(shares)[::-1]
    sums = falling.cumsum()
    nucleus = int(sums.searchsorted(top_p * sums[-1])) + 1
    least = falling[nucleus - 1]
    shares[shares < least] = 0.0
    equal = np.flatnonzero(shares == least)
    shares[equal[nucleus - int(np.count_nonzero(shares > least)) :]] = 0.0
