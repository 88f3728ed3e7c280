"""What policies are made of: admission, prefills, decodes, chunks. A policy is one method, ``schedule``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.block_pool import BlockPool, PrefixSharing
from firsttoken.engine.preemptor import Preemptor
from firsttoken.engine.request import Phase, Request, Work
from firsttoken.engine.scheduler_config import Bounds
from firsttoken.engine.scheduler_state import Holdings, Victim


class Scheduler(Holdings, ABC):
    """Says what the coming step processes, within ``bounds``.

    A ``steady`` one, where nobody waits and its last step decoded all who run, does so until somebody comes or ends.
    """

    name: ClassVar[str]
    steady: ClassVar[bool] = False

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        bounds: Bounds,
        preemptor: Preemptor,
        victim: Victim,
        prefixes: PrefixSharing | None = None,
    ) -> None:
        super().__init__(pool, block_tokens, preemptor, victim, prefixes)
        self.bounds = bounds

    @classmethod
    def check(cls, bounds: Bounds) -> None:
        """Raises ProfileError for bounds that it cannot keep."""
        return None  # most can keep any

    @abstractmethod
    def schedule(self) -> list[Work]:
        """The work of the coming step, its blocks taken; empty when nothing can run now."""

    # -- what policies are made of

    def work(self, request: Request, tokens: int | None = None) -> Work:
        """The next ``tokens`` tokens of ``request`` (all that are to do) in the coming step, until which it stays."""
        work = request.work(tokens)
        self.planned.append(work)
        if self.prefixes is not None:
            self.prefixes.publish(work)
        return work

    def admit(self, *, reserve: bool = False) -> Request | None:
        """The first waiting request, running now, with blocks for all its tokens; None when there is no room.

        ``reserve`` takes blocks for as many tokens as it may ever have.
        """
        if not self.waiting or self.full >= self.bounds.requests:
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
        self.stand(request, Phase.RUNNING)
        return request

    def prefills(self, *, reserve: bool = False, admit: bool = True) -> list[Work]:
        """What has begun and, with ``admit``, whole prompts until requests, blocks or the prefill budget run out.

        The first may exceed the budget.
        """
        works: list[Work] = []
        left = self.bounds.prefill_tokens
        for request in [request for request in self.running if not request.decoding]:
            if not works or request.todo <= left:
                works.append(self.work(request))
                left -= works[-1].tokens
        while admit and self.waiting and (not works or self._needs(self.waiting[0]) <= left):
            request = self.admit(reserve=reserve)
            if request is None:
                break
            works.append(self.work(request))
            left -= request.todo
        return works

    def decodes(self) -> list[Work]:
        """One token of every decoding request, the first come first; who finds no block left preempts others."""
        works: list[Work] = []
        for request in sorted(self.running, key=lambda request: request.order):
            if request.phase is Phase.RUNNING and request.decoding and self._grow(request):
                works.append(self.work(request, 1))
        return works

    def ready(self) -> tuple[list[Work], bool]:
        """One token of every request that can decode, those that come back from the host included; whether nobody had
        to be preempted for it. Where somebody had to, nobody comes back in the same step."""
        before = self.preempted
        works = self.decodes()
        if self.preempted > before:
            return works, False
        known = len(self.running)
        self.resume()
        return works + [self.work(request) for request in self.running[known:]], True

    def chunks(self, tokens: int, *, admit: bool) -> list[Work]:
        """Up to ``tokens`` tokens of prompts: of those that have begun, then, with ``admit``, of new ones."""
        works: list[Work] = []
        idle = len(self.running) > len(self.planned)  # else everybody who runs has his part of the step
        begun = iter([request for request in self.running if not request.decoding] if idle else [])
        while tokens > 0:
            request = next(begun, None) or (self.admit() if admit else None)
            if request is None:
                break
            works.append(self.work(request, min(tokens, request.todo)))
            tokens -= works[-1].tokens
        return works

    def resume(self) -> None:
        """Give blocks back to swapped requests, the first come first, as long as there are enough.

        Where the first does not fit the others wait too, unless ``bounds.overtake`` lets any that fits go ahead.
        """
        for request in sorted(self.swapped, key=lambda request: request.order):
            if self.full >= self.bounds.requests:
                return
            blocks = self.pool.take(self._missing(request, request.cached + 1), admission=True)
            if blocks is not None:
                request.blocks = blocks
                if self.prefixes is not None:
                    self.prefixes.returned(request)
                self.preemptor.restore(request)
                self.stand(request, Phase.RUNNING if self.preemptor.poll(request) else Phase.RESTORING)
            elif not self.bounds.overtake:
                return

    # -- what the engine calls

    def plan(self) -> list[Work]:
        """What ``schedule`` says, from a clean sheet."""
        self.planned.clear()
        return self.schedule()

    def completed(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        """A step took ``seconds``: ``prefills`` are its (cached, new) tokens, ``contexts`` those of its decodes."""
        return None  # most policies learn nothing from it
