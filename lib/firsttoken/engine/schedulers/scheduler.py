"""What policies are made of: admission, prefills, decodes, chunks. A policy is one method, ``schedule``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.block_pool import BlockPool, PrefixSharing
from firsttoken.engine.preemption.preemption_policy import Preemptor
from firsttoken.engine.request import Phase, Request, ScheduledChunk
from firsttoken.engine.scheduler_config import SchedulerConfig
from firsttoken.engine.scheduler_state import SchedulerState, Victim
from firsttoken.old_names import OldMember


class Scheduler(SchedulerState, ABC):
    """Says what the coming step processes, within ``config``.

    A ``steady`` one, where nobody waits and its last step decoded all who run, does so until somebody comes or ends.
    """

    name: ClassVar[str]
    steady: ClassVar[bool] = False
    work, bounds = OldMember("chunk"), OldMember("config")  # as readers' schedulers have them

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        config: SchedulerConfig,
        preemptor: Preemptor,
        victim: Victim,
        prefixes: PrefixSharing | None = None,
    ) -> None:
        super().__init__(pool, block_tokens, preemptor, victim, prefixes)
        self.config = config

    @classmethod
    def check(cls, config: SchedulerConfig) -> None:
        """Raises ProfileError for bounds that it cannot keep."""
        return None  # most can keep any

    @abstractmethod
    def schedule(self) -> list[ScheduledChunk]:
        """The work of the coming step, its blocks taken; empty when nothing can run now."""

    # -- what policies are made of

    def chunk(self, request: Request, tokens: int | None = None) -> ScheduledChunk:
        """The next ``tokens`` tokens of ``request`` (all that are to do) in the coming step, until which it stays."""
        chunk = request.chunk(tokens)
        self.planned.append(chunk)
        if self.prefixes is not None:
            self.prefixes.publish(chunk)
        return chunk

    def admit(self, *, reserve: bool = False) -> Request | None:
        """The first waiting request, running now, with blocks for all its tokens; None when there is no room.

        ``reserve`` takes blocks for as many tokens as it may ever have.
        """
        if not self.waiting or self.full >= self.config.requests:
            return None
        request = self.waiting[0]
        tokens = request.most_cached if reserve else len(request.tokens)
        shared = [] if request.number in self.pending else self._shared(request)
        blocks = self.pool.take(self._missing(request, tokens) - len(shared), admission=True, shared=shared)
        if blocks is None:
            return None
        request.blocks = blocks
        if self.prefixes is not None:
            self.prefixes.admitted(request, len(shared))
        if request.number in self.pending:
            self._await(request)
            return self.admit(reserve=reserve)
        self.move_to(request, Phase.RUNNING)
        return request

    def prefills(self, *, reserve: bool = False, admit: bool = True) -> list[ScheduledChunk]:
        """What has begun and, with ``admit``, whole prompts until requests, blocks or the prefill budget run out.

        The first may exceed the budget.
        """
        chunks: list[ScheduledChunk] = []
        left = self.config.prefill_tokens
        for request in [request for request in self.running if not request.decoding]:
            # A prompt is not cut here, so one that is longer than the budget would never run if it could not go first.
            if not chunks or request.remaining <= left:
                chunks.append(self.chunk(request))
                left -= chunks[-1].tokens
        while admit and self.waiting and (not chunks or self._needs(self.waiting[0]) <= left):
            request = self.admit(reserve=reserve)
            if request is None:
                break
            chunks.append(self.chunk(request))
            left -= request.remaining
        return chunks

    def decodes(self) -> list[ScheduledChunk]:
        """One token of every decoding request, the first come first; who finds no block left preempts others."""
        chunks: list[ScheduledChunk] = []
        for request in sorted(self.running, key=lambda request: request.order):
            if request.phase is Phase.RUNNING and request.decoding and self._grow(request):
                chunks.append(self.chunk(request, 1))
        return chunks

    def ready(self) -> tuple[list[ScheduledChunk], bool]:
        """One token of every request that can decode, those that come back from the host included; whether nobody had
        to be preempted for it. Where somebody had to, nobody comes back in the same step."""
        before = self.preempted
        chunks = self.decodes()
        if self.preempted > before:
            return chunks, False
        known = len(self.running)
        self.resume()
        return chunks + [self.chunk(request) for request in self.running[known:]], True

    def chunks(self, tokens: int, *, admit: bool) -> list[ScheduledChunk]:
        """Up to ``tokens`` tokens of prompts: of those that have begun, then, with ``admit``, of new ones."""
        chunks: list[ScheduledChunk] = []
        idle = len(self.running) > len(self.planned)  # else everybody who runs has his part of the step
        begun = iter([request for request in self.running if not request.decoding] if idle else [])
        while tokens > 0:
            request = next(begun, None) or (self.admit() if admit else None)
            if request is None:
                break
            chunks.append(self.chunk(request, min(tokens, request.remaining)))
            tokens -= chunks[-1].tokens
        return chunks

    def resume(self) -> None:
        """Give blocks back to swapped requests, the first come first, as long as there are enough.

        Where the first does not fit the others wait too, unless ``config.overtake`` lets any that fits go ahead.
        """
        for request in sorted(self.swapped, key=lambda request: request.order):
            if self.full >= self.config.requests:
                return
            blocks = self.pool.take(self._missing(request, request.cached + 1), admission=True)
            if blocks is not None:
                request.blocks = blocks
                if self.prefixes is not None:
                    self.prefixes.returned(request)
                self.preemptor.restore(request)
                self.move_to(request, Phase.RUNNING if self.preemptor.poll(request) else Phase.RESTORING)
            elif not self.config.overtake:
                return

    # -- what the engine calls

    def plan(self) -> list[ScheduledChunk]:
        """What ``schedule`` says, from a clean sheet."""
        self.planned.clear()
        return self.schedule()

    def completed(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        """A step took ``seconds``: ``prefills`` are its (cached, new) tokens, ``contexts`` those of its decodes."""
        return None  # most policies learn nothing from it
