"""What every scheduler shares: queues, admission, blocks, preemption. A policy is one method, ``schedule``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from firsttoken.engine.blocks import BlockPool
from firsttoken.engine.bounds import Bounds
from firsttoken.engine.preemption.base import Action
from firsttoken.engine.preemptor import Preemptor
from firsttoken.engine.prefixes import PrefixSharing
from firsttoken.engine.request import Phase, Request
from firsttoken.engine.schedulers.victims import Victim
from firsttoken.engine.work import Work


class Scheduler(ABC):
    """Says what the coming step processes.

    The queues: ``waiting`` (new, or to be recomputed; those go first), ``running`` and ``restoring`` (they have
    blocks), ``swapped``. Only here does a request's phase change: it is the queue that it stands in. Blocks are counted
    in ``pool``; ``block_tokens`` tokens fill one, and ``prefixes``, if given, shares them.

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
        self.pool = pool
        self.block_tokens = block_tokens
        self.bounds = bounds
        self.preemptor = preemptor
        self.victim = victim
        self.prefixes = prefixes
        self.planned: list[Work] = []  # for the coming step, by now
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.restoring: list[Request] = []
        self.swapped: list[Request] = []
        self.preempted = 0  # how often so far
        self._queues: dict[Phase, deque[Request] | list[Request]] = {
            Phase.WAITING: self.waiting,
            Phase.RUNNING: self.running,
            Phase.RESTORING: self.restoring,
            Phase.SWAPPED: self.swapped,
        }

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
        if not self.waiting or len(self.running) + len(self.restoring) >= self.bounds.requests:
            return None
        request = self.waiting[0]
        tokens = request.most_cached if reserve else len(request.tokens)
        shared = self._shared(request)
        blocks = self.pool.take(self._missing(request, tokens) - len(shared), admission=True, shared=shared)
        if blocks is None:
            return None
        request.blocks = blocks
        if self.prefixes is not None:
            self.prefixes.admitted(request, len(shared))
        self._move(request, Phase.RUNNING)
        return request

    def prefills(self, *, reserve: bool = False) -> list[Work]:
        """Admit whole prompts until requests, blocks or the prefill budget run out; the first may exceed the budget."""
        works: list[Work] = []
        left = self.bounds.prefill_tokens
        while self.waiting and (not works or self._needs(self.waiting[0]) <= left):
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

    def arrange(self, turn: Callable[[Request], Any]) -> None:
        """Whoever waits stands in the order of ``turn``, the least first."""
        ordered = sorted(self.waiting, key=turn)
        self.waiting.clear()
        self.waiting.extend(ordered)

    def resume(self) -> None:
        """Give blocks back to swapped requests, the first come first, as long as there are enough.

        Where the first does not fit the others wait too, unless ``bounds.overtake`` lets any that fits go ahead.
        """
        for request in sorted(self.swapped, key=lambda request: request.order):
            if len(self.running) + len(self.restoring) >= self.bounds.requests:
                return
            blocks = self.pool.take(self._missing(request, request.cached + 1), admission=True)
            if blocks is not None:
                request.blocks, request.published = blocks, 0
                self.preemptor.restore(request)
                self._move(request, Phase.RUNNING if self.preemptor.poll(request) else Phase.RESTORING)
            elif not self.bounds.overtake:
                return

    # -- what the engine calls

    def plan(self) -> list[Work]:
        """What ``schedule`` says, from a clean sheet."""
        self.planned.clear()
        return self.schedule()

    def withdraw(self) -> None:
        """The step failed: what it was to write is not there, and nobody may find it."""
        if self.prefixes is not None:
            for work in self.planned:
                self.prefixes.withdraw(work)

    def arrive(self, request: Request) -> None:
        """A new request."""
        self._move(request, Phase.WAITING)

    def completed(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        """A step took ``seconds``: ``prefills`` are its (cached, new) tokens, ``contexts`` those of its decodes."""
        return None  # most policies learn nothing from it

    def collect(self, *, wait: bool = False) -> None:
        """Requests whose keys and values have come back run again; with ``wait``, wait for the first."""
        for request in list(self.restoring):
            if self.preemptor.poll(request, wait=wait):
                self._move(request, Phase.RUNNING)
                wait = False

    def end(self, request: Request) -> None:
        """The request is over, wherever it stands; its blocks are free again."""
        self.preemptor.forget(request)
        self._release(request)
        self._move(request, Phase.FINISHED)

    def preempt(self, victim: Request) -> None:
        """Take the blocks of ``victim`` away; it waits, before all who never ran, or is swapped out."""
        self.preempted += 1
        action = self.preemptor.evict(victim)
        self._release(victim)
        if action is Action.SWAP:
            self._move(victim, Phase.SWAPPED)
        else:
            self._move(victim, Phase.WAITING)
            self.waiting.rotate(1)

    def _move(self, request: Request, phase: Phase) -> None:
        """Out of the queue of its phase, if it had come there, and to the end of the next one's."""
        if request in self._queues[request.phase]:
            self._queues[request.phase].remove(request)
        request.phase = phase
        if phase is not Phase.FINISHED:
            self._queues[phase].append(request)

    def _grow(self, request: Request) -> bool:
        """Take the block that the next token of ``request`` may need; False when it had to give up its own."""
        if request.cached < len(request.blocks) * self.block_tokens:
            return True
        while (blocks := self.pool.take(self._missing(request, request.cached + 1))) is None:
            fixed = {work.request.number for work in self.planned}
            victim = self.victim([other for other in self.running if other.number not in fixed])
            self.preempt(victim)
            if victim is request:
                return False
        request.blocks += blocks
        return True

    def _shared(self, request: Request) -> list[int]:
        return [] if self.prefixes is None else self.prefixes.find(request)

    def _needs(self, waiting: Request) -> int:
        """Tokens to process once it is admitted."""
        return waiting.todo - len(self._shared(waiting)) * self.block_tokens

    def _missing(self, request: Request, tokens: int) -> int:
        return max(0, -(-tokens // self.block_tokens) - len(request.blocks))

    def _release(self, request: Request) -> None:
        self.pool.give(request.blocks)
        request.blocks = []
