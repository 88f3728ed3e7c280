"""Which hidden states can be a model's: what either side of a swarm refuses before it computes with it or answers."""

from __future__ import annotations

from torch import Tensor

from firsttoken.study.errors import SwarmError

LARGEST = 2.0**24
"""The largest number, without its sign, that hidden states may hold: 16,777,216.

Every layer adds numbers of about one to the states that enter it, and above this float32 is too coarse to add one: what
later layers compute would be lost. Models stay far below it: a few thousand is usual, and some 700,000 is the most that
has been reported (the massive activations of Gemma 3 with 27 billion parameters, which float16 cannot hold either).
"""


def check_states(hidden: Tensor, what: str = "hidden states hold") -> None:
    """Raise SwarmError, whose message begins with ``what``, unless the numbers of ``hidden`` [any shape] are finite and
    at most ``LARGEST``, of either sign."""
    if not hidden.numel():
        return
    low, high = (float(end) for end in hidden.aminmax())  # both are NaN where any number is
    if low >= -LARGEST and high <= LARGEST:
        return
    finite = max(-low, high) < float("inf")
    held = f"{max(-low, high):.1e}, beyond {LARGEST:,.0f}" if finite else "NaN or infinity"
    raise SwarmError(f"{what} {held}: the server that computed them is at fault")
