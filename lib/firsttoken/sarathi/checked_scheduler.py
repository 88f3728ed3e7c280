"""A scheduler of the reader's own, every step of which is looked at before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.study.errors import ProfileError
from firsttoken.study.policy_file import Decisions

LAPS = 20  # times that all open requests could have been processed while none of them ended
EMPTY = 1000  # steps without work in a row; a preemption that makes room takes one


def watched(kind: type[Scheduler], file: Path, decisions: Decisions) -> type[Scheduler]:
    """Return ``kind`` of ``file`` so that it raises ProfileError for a step against the rules, and when nothing ends.

    ``decisions`` know when one is being taken.
    """
    return type(kind.__name__, (_CheckedScheduler, kind), {"file": file, "decisions": decisions, "steady": False})


class _CheckedScheduler(Scheduler):
    file: ClassVar[Path]
    decisions: ClassVar[Decisions]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._empty = 0  # steps without work in a row
        self._processed = self._most = 0  # tokens since a request ended, and how many there may be

    def plan(self) -> list[ScheduledChunk]:
        with self.decisions.deciding():
            chunks = super().plan()
        self._check_chunks(chunks)
        self._check_progress(chunks)
        return chunks

    def end(self, request: Request) -> None:
        super().end(request)
        self._processed = self._most = 0

    def _check_chunks(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Check that ``chunks`` are of known requests, once each, their next tokens, with blocks for these, and no more
        than the budget."""
        if not isinstance(chunks, list) or not all(isinstance(chunk, ScheduledChunk) for chunk in chunks):
            raise self._error("schedule must return a list of what self.chunk gives")
        running, scheduled = set(map(id, self.running)), set[int]()
        for chunk in chunks:
            request = chunk.request
            if id(request) not in running:
                raise self._error(f"a step for request {request.number}, which is not running; admit it first")
            if id(request) in scheduled:
                raise self._error(f"request {request.number} is twice in a step; give it one piece")
            scheduled.add(id(request))
            if chunk != request.chunk(chunk.tokens) or not 0 < chunk.tokens <= request.remaining:
                raise self._error(
                    f"tokens {chunk.start} to {chunk.end - 1} of request {request.number}, whose next is "
                    f"{request.cached} of {len(request.tokens)}; make chunks by self.chunk"
                )
            if chunk.end > (room := len(request.blocks) * self.block_tokens):
                raise self._error(
                    f"request {request.number} would have {chunk.end} tokens and has blocks for {room}; "
                    "admit it or let it grow before"
                )
        tokens = sum(chunk.tokens for chunk in chunks)
        if tokens > (budget := self.config.token_budget):
            raise self._error(
                f"a step of {tokens} tokens with a budget of {budget}; name what it needs, as in '{self.file} {tokens}'"
            )

    def _check_progress(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Check that some request ends before long and that work comes before long."""
        self._empty = 0 if chunks else self._empty + 1
        if self._empty > EMPTY:
            raise self._error(f"never finishes: {EMPTY:,} steps in a row without work, and requests are open")
        self._processed += sum(chunk.tokens for chunk in chunks)
        if self._processed > self._most:
            queues = self.waiting, self.running, self.restoring, self.swapped
            self._most = LAPS * sum(request.most_cached for queue in queues for request in queue)
            if self._processed > self._most:
                raise self._error(
                    f"never finishes: {self._processed:,} tokens processed since a request ended, {LAPS} times what "
                    "all open ones need"
                )

    def _error(self, fault: str) -> ProfileError:
        return ProfileError(f"{self.file}: {fault}")
