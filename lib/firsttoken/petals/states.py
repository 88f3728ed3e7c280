"""Which hidden states, of which tokens, a message may hold: what either side of a swarm refuses before it computes or
answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from firsttoken.study.errors import SwarmError

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 512  # of a message; a client cuts what is longer
_ROOM = 1 << 16  # bytes of a message beside its numbers

LARGEST = 2.0**24
"""The largest number, without its sign, that hidden states may hold: 16,777,216.

Every layer adds numbers of about one to the states that enter it, and above this float32 is too coarse to add one: what
later layers compute would be lost. Models stay far below it: a few thousand is usual, and some 700,000 is the most that
has been reported (the massive activations of Gemma 3 with 27 billion parameters, which float16 cannot hold either).
"""


class Stretch(NamedTuple):
    """Tokens [start, end) of the sequence that a client calls ``number``."""

    number: int
    start: int
    end: int


def check_states(hidden: Tensor, what: str = "hidden states hold") -> None:
    """Raise SwarmError, whose message begins with ``what``, unless the numbers of ``hidden`` [any shape] are finite and
    at most ``LARGEST``, of either sign."""
    if not hidden.numel():
        return
    low, high = hidden.aminmax()  # both are NaN where any number is
    check_range(float(low), float(high), what)


def check_range(low: float, high: float, what: str = "hidden states hold") -> None:
    """Raise as ``check_states``, for states whose smallest and largest numbers these are."""
    if low >= -LARGEST and high <= LARGEST:
        return
    finite = max(-low, high) < float("inf")
    held = f"{max(-low, high):.1e}, beyond {LARGEST:,.0f}" if finite else "NaN or infinity"
    raise SwarmError(f"{what} {held}: the server that computed them is at fault")


def end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` [tokens, hidden] as one; of one alone nothing is copied, which a step of one token would do six
    times."""
    if len(parts) == 1:
        return parts[0]
    import torch

    return torch.cat(parts)


def most_bytes(width: int, trained: int = 0) -> int:
    """Return the most bytes of a message of hidden states that are ``width`` wide: more is refused unreceived.

    Where layers are ``trained`` through, this is for a pass: the states and their gradient, and for each layer 1,024
    bytes of LoRA for each value of a state, which is rank 8 beside all linear modules, or some 60 beside two.
    """
    if trained:
        return 2 * MOST_TOKENS * width * 4 + trained * width * 1024 + _ROOM
    return MOST_TOKENS * width * 5 + _ROOM  # int8 with a scale for each number is as large as it gets
