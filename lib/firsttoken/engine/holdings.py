"""Who has which blocks: requests come, lose them, have them back, move to another view, and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.engine.blocks import BlockPool
from firsttoken.engine.brought import Bringing
from firsttoken.engine.preemption.base import Action
from firsttoken.engine.preemptor import Preemptor
from firsttoken.engine.prefixes import PrefixSharing
from firsttoken.engine.queues import Queues
from firsttoken.engine.request import Phase, Request
from firsttoken.engine.victims import Victim
from firsttoken.engine.work import Work

if TYPE_CHECKING:
    from firsttoken.engine.views import View


class Holdings(Queues):
    """The queues, and what each request in them holds.

    Blocks are counted in ``pool``; ``block_tokens`` tokens fill one, and ``prefixes``, if given, shares them.
    ``preemptor`` saves and restores what ``victim`` chooses to give way.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        preemptor: Preemptor,
        victim: Victim,
        prefixes: PrefixSharing | None = None,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.block_tokens = block_tokens
        self.preemptor = preemptor
        self.victim = victim
        self.prefixes = prefixes
        self.planned: list[Work] = []  # for the coming step, by now
        self.preempted = 0  # how often so far
        self.brought: list[Request] = []  # they have blocks, and a prefix on its way into them
        self._bringing = Bringing(preemptor.executor)

    def arrive(self, request: Request) -> None:
        """A new request."""
        self.stand(request, Phase.WAITING)

    def collect(self, *, wait: bool = False) -> None:
        """Requests whose keys and values have come run; with ``wait``, wait for the first that comes back."""
        self.brought = [request for request in self.brought if request.source is not None]
        for request in self.brought:
            phase = Phase.RUNNING if self._bringing.look(request) else Phase.RESTORING
            if phase is not request.phase:
                self.stand(request, phase)
        for request in [request for request in self.restoring if request.source is None]:
            if self.preemptor.poll(request, wait=wait):
                self.stand(request, Phase.RUNNING)
                wait = False

    def end(self, request: Request) -> None:
        """The request is over, wherever it stands; its blocks are free again. Raises DeviceLost, once it is."""
        try:
            self.preemptor.forget(request)
        finally:
            self._release(request)
            self.stand(request, Phase.FINISHED)

    def preempt(self, victim: Request) -> None:
        """Take the blocks of ``victim`` away; it waits, before all who never ran, or is swapped out."""
        self.preempted += 1
        action = self.preemptor.evict(victim)
        self._release(victim)
        if action is Action.SWAP:
            self.stand(victim, Phase.SWAPPED)
        else:
            self.go_first(victim)

    def move(self, request: Request, view: View, layers: range) -> None:
        """``request``, which has begun, computes with ``view`` from now on, and ``layers`` again under the budgets of
        the coming steps. Raises RequestError where hidden states that this begins with were not kept."""
        if request.source is not None:  # what was to come would be of another view
            request.forget()
            request.computed = 0
        again = bool(layers) and (request.cached > 0 or request.redo is not None)
        elsewhere = request.phase is Phase.SWAPPED or self.prefixes is not None  # or in blocks that others read too
        redo = request.view.redo(request, layers) if again and not elsewhere else request.redo
        view.take_over(request)
        if not again:
            if self.prefixes is not None:
                self.prefixes.part(request)
            if request.phase is Phase.RESTORING and request.host is None:
                self.stand(request, Phase.RUNNING)
        else:
            self.preemptor.move(request)
            if elsewhere:
                self._release(request)
                request.forget()
                self.go_first(request)
            else:
                self.stand(request, Phase.RUNNING)
        request.turn(view, None if again and elsewhere else redo)

    def lose(self) -> list[Request]:
        """The device is lost, with all keys and values: who had any there, or in its host, waits before all who never
        ran, and computes them again. Those requests, the first come first."""
        self.pool.forget()
        self.brought.clear()
        had = sorted([*self.running, *self.restoring, *self.swapped], key=lambda request: request.order)
        for request in reversed(had):
            self.preemptor.lose(request)
            self._release(request)
            self.go_first(request)
        return had

    def _await(self, request: Request) -> None:
        """Its prefix comes from elsewhere; nobody else may share what is computed upon it."""
        if self.prefixes is not None:
            self.prefixes.part(request)
        request.source.begin()
        self.brought.append(request)
        self.stand(request, Phase.RESTORING)

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

    def withdraw(self) -> None:
        """The step failed: what it was to write is not there. Nobody may find it, and who has it from another, admitted
        for that same step, waits before all who never ran, and computes it."""
        if self.prefixes is None:
            return
        absent = {block for work in self.planned for block in self.prefixes.withdraw(work)}
        for request in sorted(self.running, key=lambda request: request.order, reverse=True):
            if not absent.isdisjoint(request.blocks[: request.cached // self.block_tokens]):
                self._release(request)
                request.forget()
                self.go_first(request)
