"""What the messages of a swarm are about: calls and headers, tokens of sequences, and which hidden states either side
refuses before it computes or answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from firsttoken.engine.request import ScheduledChunk
from firsttoken.study.dtypes import range_fault
from firsttoken.study.errors import SwarmError

SERVICE = "firsttoken.Swarm"
SESSION, PASS, EXCHANGE, ACCUSE = (f"/{SERVICE}/{call}" for call in ("Session", "Pass", "Exchange", "Accuse"))
"""The calls of a server over gRPC."""

VERSION = "4"
HEADERS = ("swarm-version", "swarm-model", "swarm-blocks", "swarm-coding")
"""What a session is opened with, in this order: version of the messages, sha256 of the model, a:b, coding."""

ADAPTER = "swarm-adapter"
"""And, for a variant of the model, the name of its adapter, as servers announce it."""

MOST_TOKENS = 512  # of a message; a client cuts what is longer
_ROOM = 1 << 16  # bytes of a message beside its numbers


class SequenceChunk(NamedTuple):
    """Tokens [start, end) of the sequence that a client calls ``number``."""

    number: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return self.end - self.start


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
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_rows(rows: Tensor, chunks: Sequence[SequenceChunk | ScheduledChunk]) -> tuple[Tensor, ...]:
    """Return what each of ``chunks``, which are end to end, has of ``rows`` [tokens, hidden]."""
    return rows.split([chunk.tokens for chunk in chunks])


def most_bytes(width: int, trained: int = 0) -> int:
    """Return the most bytes of a message of hidden states that are ``width`` wide: more is refused unreceived.

    Where layers are ``trained`` through, this is for a pass: the states and their gradient, and for each layer 1,024
    bytes of LoRA for each value of a state, which is rank 8 beside all linear modules, or some 60 beside two.
    """
    if trained:
        return 2 * MOST_TOKENS * width * 4 + trained * width * 1024 + _ROOM
    return MOST_TOKENS * width * 5 + _ROOM  # int8 with a scale for each number is as large as it gets
