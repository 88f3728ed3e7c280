"""What a step does for a request: which of its tokens it processes, and as what they are booked."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from firsttoken.engine.request import Request


class Kind(StrEnum):
    """What a step does for a token: for the first time, one of the prompt or one that was generated; or once more."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"


class Booking(NamedTuple):
    """One line of the books: tokens [start, end) of a request."""

    request: int
    kind: Kind
    start: int
    end: int


class Redo(NamedTuple):
    """What a request has to compute once more: its first ``end`` tokens through ``layers`` (0-based).

    ``hidden`` [1, end, hidden] enters the first of them; None where that is what the model makes of the ids.
    """

    layers: range
    end: int
    hidden: Tensor | None = None


class Work(NamedTuple):
    """Tokens [start, end) of ``request`` in the coming step; those before ``computed`` were computed before.

    With a ``redo`` they go through its layers only, and nothing is said.
    """

    request: Request
    start: int
    end: int
    computed: int
    redo: Redo | None = None

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.start

    @property
    def completes(self) -> bool:
        """Whether the step gives the request its next token."""
        return self.redo is None and self.end == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it is one generated token, and the first time that this is processed."""
        return self.request.prompt_tokens <= self.start == self.computed

    @property
    def bookings(self) -> list[Booking]:
        """What is computed again, what is prefilled and what is decoded of it, in the order of its tokens."""
        if self.decodes:
            return [Booking(self.request.number, Kind.DECODE, self.start, self.end)]
        prompt = self.request.prompt_tokens
        known, prefilled = min(self.computed, self.end), min(max(self.computed, prompt), self.end)
        cuts = (self.start, max(known, self.start), max(prefilled, self.start), self.end)
        kinds = (Kind.RECOMPUTE, Kind.PREFILL, Kind.DECODE)
        return [
            Booking(self.request.number, *line)
            for line in zip(kinds, cuts, cuts[1:], strict=False)
            if line[1] < line[2]
        ]


def parted(works: Sequence[Work]) -> tuple[list[Work], tuple[int, ...]]:
    """Works that do more than decode, and the cached tokens of each that decodes."""
    others, contexts = [], []
    for work in works:
        if work.request.prompt_tokens <= work.start == work.computed:  # as ``decodes``, without a call: this is hot
            contexts.append(work.start)
        else:
            others.append(work)
    return others, tuple(contexts)


def shapes(works: Sequence[Work]) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """What the cost of a step hangs on: (cached, new) tokens of what it prefills, and cached tokens of each decode."""
    others, contexts = parted(works)
    return tuple((work.start, work.tokens) for work in others), contexts
