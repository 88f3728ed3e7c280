"""Which hidden states, of which tokens, a message may hold: what either side of a swarm refuses before it computes or
answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from firsttoken.study.dtypes import range_fault
from firsttoken.study.errors import SwarmError

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 512  # of a message; a client cuts what is longer
_ROOM = 1 << 16  # bytes of a message beside its numbers


class Stretch(NamedTuple):
    """Tokens [start, end) of the sequence that a client calls ``number``."""

    number: int
    start: int
    end: int


def check_states(hidden: Tensor, subject: str = "hidden states hold") -> None:
    """Raise SwarmError, whose message begins with ``subject``, unless the numbers of ``hidden`` [any shape] are
    finite and at most ``dtypes.LARGEST``, of either sign."""
    if not hidden.numel():
        return
    low, high = hidden.aminmax()  # both are NaN where any number is
    if fault := range_fault(float(low), float(high)):
        raise SwarmError(f"{subject} {fault}: the server that computed them is at fault")


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
