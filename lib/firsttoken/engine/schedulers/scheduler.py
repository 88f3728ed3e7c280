"""The parts that policies are made of: admission, prefills, decodes, chunks. A policy is one method, ``schedule``.

Here requests have blocks, lose them, have them back, move to another version, and end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from firsttoken.engine.block_pool import BlockPool, PrefixSharing
from firsttoken.engine.drafts import take_draft
from firsttoken.engine.executor import Version
from firsttoken.engine.preemption.preemption_policy import Action, Preemptor
from firsttoken.engine.preemption.resume import IN_ORDER, resume_order_named
from firsttoken.engine.preemption.victims import Victim
from firsttoken.engine.request import Phase, Request, ScheduledChunk
from firsttoken.engine.scheduler_state import KVSource, LayerwisePrefill, PendingPrefix, Queues
from firsttoken.engine.schedulers.scheduler_config import SchedulerConfig


class Scheduler(Queues, ABC):
    """Says what the coming step processes, within ``config``; keeps the queues, and what each request in them holds.

    Blocks are counted in ``pool``; ``block_tokens`` tokens fill one, and ``prefixes``, if given, shares them.
    ``preemptor`` saves and restores what ``victim`` chooses to give way.

    A ``steady`` one, where nobody waits and its last step decoded all who run, does so until somebody comes or ends.
    """

    name: ClassVar[str]
    steady: ClassVar[bool] = False

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        config: SchedulerConfig,
        preemptor: Preemptor,
        victim: Victim,
        prefixes: PrefixSharing | None = None,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.block_tokens = block_tokens
        self.config = config
        self.preemptor = preemptor
        self.victim = victim
        self.resume_order = resume_order_named(config.resume)
        self.prefixes = prefixes
        self.planned: list[ScheduledChunk] = []  # for the coming step, by now
        self.preempted = 0  # how often so far
        self.pending: dict[int, PendingPrefix | LayerwisePrefill] = {}  # by the number of the request that it is of

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

        ``reserve`` takes blocks for as many tokens as it may ever have. Those that can be answered go before prompts
        that follow layers as they arrive, which make room for them.
        """
        while self.waiting:
            request = next((first for first in self.waiting if not self._follows_layers(first)), self.waiting[0])
            layerwise = self._follows_layers(request)
            shared = [] if layerwise or request.number in self.pending else self._shared(request)
            tokens = (request.most_cached if reserve else len(request.tokens)) - len(shared) * self.block_tokens
            while (blocks := self._blocks(request, tokens, shared)) is None:
                if layerwise or not self._make_room():
                    return None
            request.blocks = blocks
            if self.prefixes is not None:
                self.prefixes.admitted(request, len(shared))
            if layerwise:
                request.version = request.version or self.preemptor.executor.version
                self.pending[request.number] = LayerwisePrefill(request)
            if request.number not in self.pending:
                self.move_to(request, Phase.RUNNING)
                return request
            self._begin_prefix(request)
        return None

    def prefills(self, *, reserve: bool = False, admit: bool = True) -> list[ScheduledChunk]:
        """Return the prefills that have begun and, with ``admit``, whole prompts until requests, blocks or the prefill
        budget run out.

        The first may exceed the budget.
        """
        chunks: list[ScheduledChunk] = []
        token_budget = self.config.prefill_tokens
        for request in [request for request in self.running if not request.decoding]:
            # A prompt is not cut here, so one that is longer than the budget would never run if it could not go first.
            if not chunks or request.remaining <= token_budget:
                chunks.append(self.chunk(request))
                token_budget -= chunks[-1].tokens
        while admit and self.waiting and (not chunks or self._needs(self.waiting[0]) <= token_budget):
            request = self.admit(reserve=reserve)
            if request is None:
                break
            chunks.append(self.chunk(request))
            token_budget -= request.remaining
        return chunks

    def decodes(self) -> list[ScheduledChunk]:
        """Return one token of every decoding request, the first come first; a request that finds no block left preempts
        others."""
        chunks: list[ScheduledChunk] = []
        for request in sorted(self.running, key=lambda request: request.order):
            if request.phase is Phase.RUNNING and request.decoding and self._grow(request):
                chunks.append(self.chunk(request, 1))
        return chunks

    def ready(self) -> tuple[list[ScheduledChunk], bool]:
        """Return one token of every request that can decode, those that come back from the host included, and whether
        nobody had to be preempted for it. Where somebody had to, nobody comes back in the same step."""
        before = self.preempted
        chunks = self.decodes()
        if self.preempted > before:
            return chunks, False
        num_running = len(self.running)
        self.resume()
        return chunks + [self.chunk(request) for request in self.running[num_running:] if request.decoding], True

    def chunks(self, tokens: int, *, admit: bool) -> list[ScheduledChunk]:
        """Up to ``tokens`` tokens of prompts: of those that have begun, then, with ``admit``, of new ones.

        A token that goes through some layers again counts as the share of the layers that they are. Counted as a whole
        token, those of requests that redid three layers of thirty filled the budget ten times as fast as their cost
        allows, and the others waited."""
        chunks: list[ScheduledChunk] = []
        idle = len(self.running) > len(self.planned)  # else everybody who runs has his part of the step
        begun = iter([request for request in self.running if not request.decoding] if idle else [])
        token_budget: float = tokens
        while token_budget >= 1:
            request = next(begun, None) or (self.admit() if admit else None)
            if request is None:
                break
            share = request.layer_share
            chunks.append(self.chunk(request, min(int(token_budget / share), request.remaining)))
            token_budget -= share * chunks[-1].tokens
        return chunks

    def resume(self) -> None:
        """Give blocks back to swapped requests in the order that ``config.resume`` names, as long as there are enough.

        Where one does not fit those behind it wait too, unless they may pass it.
        """
        for request in sorted(self.swapped, key=self.resume_order.turn):
            if not self.bring_back(request) and not self._may_be_passed(request):
                return

    def bring_back(self, request: Request) -> bool:
        """Give blocks to the swapped ``request``, and begin to restore it; return whether there are enough."""
        while (blocks := self._blocks(request, request.cached + 1)) is None:
            if not self._make_room():
                return False
        request.blocks = blocks
        if self.prefixes is not None:
            self.prefixes.returned(request)
        self.preemptor.restore(request)
        computes = bool(request.head) or self.preemptor.poll(request)
        self.move_to(request, Phase.RUNNING if computes else Phase.RESTORING)
        return True

    def _may_be_passed(self, request: Request) -> bool:
        """Return whether others may go ahead of the preempted ``request`` while it does not fit."""
        last_s = request.times_s[-1] if request.times_s else request.arrival_s
        return self.resume_order.may_pass(self.preemptor.executor.now() - last_s, self.config.wait_s)

    def _sort_preempted(self) -> None:
        """Sort the waiting requests that were preempted by the resume order, before all that never ran. Where others
        may pass one that does not fit, those that fit come first."""

        def turn(request: Request) -> tuple[Any, ...]:
            if not request.preemptions:
                return (True,)
            fits = self._missing(request, len(request.tokens)) <= self.pool.free - self.pool.watermark
            return False, not fits and self._may_be_passed(request), self.resume_order.turn(request)

        self.sort_waiting(turn)

    # -- what the engine calls

    def plan(self) -> list[ScheduledChunk]:
        """Call ``schedule`` with nothing planned, and return its chunks."""
        self.planned.clear()
        if self.config.resume != IN_ORDER and any(request.preemptions for request in self.waiting):
            self._sort_preempted()
        return self.schedule()

    def completed(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        """Learn that a step took ``seconds``: ``prefills`` are its (cached, new) tokens, ``contexts`` those of its
        decodes."""
        return None  # most policies learn nothing from it

    @property
    def awaiting(self) -> bool:
        """Return whether any request has blocks, and a prefix or layers on the way, or waits to follow layers."""
        return any(prefix.begun for prefix in self.pending.values()) or any(map(self._follows_layers, self.waiting))

    def expect(self, request: Request, source: KVSource, depth: int | None) -> None:
        """Note that ``source`` brings the beginning of ``request``, which is about to arrive. Raises as
        PendingPrefix."""
        self.pending[request.number] = PendingPrefix(request, source, depth)

    def add(self, request: Request) -> None:
        """Add a new request to those that wait."""
        self.move_to(request, Phase.WAITING)

    def collect(self, *, wait: bool = False) -> None:
        """Run the requests whose keys and values have come; with ``wait``, wait for the first that comes back."""
        for prefix in [prefix for prefix in self.pending.values() if prefix.begun]:
            request = prefix.request
            phase = Phase.RUNNING if prefix.poll(self.preemptor.executor) else Phase.RESTORING
            if prefix.closed:
                del self.pending[request.number]
            # those that follow layers stay in the order in which they came
            if phase is not request.phase or isinstance(prefix, LayerwisePrefill):
                self.move_to(request, phase)
        for request in [request for request in self.restoring if request.number not in self.pending]:
            if self.preemptor.poll(request, wait=wait):
                self.move_to(request, Phase.RUNNING)
                wait = False

    def await_copy(self, request: Request) -> None:
        """Let ``request`` wait for the copy of its other tokens, once all that it computes again is there."""
        if request.head and request.cached == request.head:
            self.move_to(request, Phase.RESTORING)

    def end(self, request: Request) -> None:
        """End the request, wherever it stands; its blocks are free again."""
        try:
            self._close_prefix(request)
            self.preemptor.forget(request)
        finally:
            self._release(request)
            self.move_to(request, Phase.FINISHED)

    def preempt(self, victim: Request) -> None:
        """Take the blocks of ``victim`` away; it waits, before all requests that never ran, or is swapped out."""
        self.preempted += 1
        action = self.preemptor.evict(victim)
        self._release(victim)
        if action is Action.RECOMPUTE:
            self._close_prefix(victim)
            self.requeue_first(victim)
        else:
            self.move_to(victim, Phase.SWAPPED)

    def move(self, request: Request, version: Version, layers: range) -> None:
        """Let ``request``, which has begun, compute with ``version`` from now on, and ``layers`` again under the
        budgets of the coming steps. Raises RequestError where hidden states that this begins with were not kept."""
        if request.number in self.pending:  # what was to come would be of another view
            self._forget(request)
            request.computed, request.fell_back = 0, "the model changed while its stored prefix was on its way"
        again = bool(layers) and (request.cached > 0 or request.redo is not None or request.head > 0)
        # in host memory, in blocks that others read too, or of a draft, which is verified from its first token on
        verified = request.sampling.verify is not None and version.whole
        elsewhere = request.phase is Phase.SWAPPED or request.head > 0 or self.prefixes is not None or verified
        redo = request.version.redo(request, layers) if again and not elsewhere else request.redo
        version.adopt(request)
        if not again:
            if self.prefixes is not None:
                self.prefixes.stop_sharing(request)
            if request.phase is Phase.RESTORING and request.host is None:
                self.move_to(request, Phase.RUNNING)
            elif request.phase is Phase.DRAFTED:
                self.requeue_first(request)
        else:
            self.preemptor.move(request)
            if elsewhere:
                self._release(request)
                self._forget(request)
                self.requeue_first(request)
            else:
                self.move_to(request, Phase.RUNNING)
        request.switch_to(version, None if again and elsewhere else redo)

    def draft(self, request: Request, token: int) -> bool:
        """Take ``token`` as a draft of ``request``; where it is none, the request waits without blocks for the whole
        model."""
        if take_draft(request, token):
            return True
        self._release(request)
        self._forget(request)
        self.move_to(request, Phase.DRAFTED)
        return False

    def withdraw(self) -> None:
        """Undo a step that failed: what it was to write is not there, and nobody may find it. A request that has it
        from another, admitted for that same step, waits before all that never ran, and computes it."""
        if self.prefixes is None:
            return
        absent = {block for chunk in self.planned for block in self.prefixes.withdraw(chunk)}
        for request in sorted(self.running, key=lambda request: request.order, reverse=True):
            if not absent.isdisjoint(request.blocks[: request.cached // self.block_tokens]):
                self._release(request)
                self._forget(request)
                self.requeue_first(request)

    # -- who has which blocks

    def _begin_prefix(self, request: Request) -> None:
        """Begin to bring the prefix of ``request`` from elsewhere; nobody else may share what is computed upon it."""
        if self.prefixes is not None:
            self.prefixes.stop_sharing(request)
        prefix = self.pending.pop(request.number)
        self.pending[request.number] = prefix  # behind those that began before
        prefix.begin()
        self.move_to(request, Phase.RESTORING)

    def _close_prefix(self, request: Request) -> None:
        """Close the stored prefix of ``request``, of which nothing more is wanted."""
        if (prefix := self.pending.pop(request.number, None)) is not None:
            prefix.close()

    def _forget(self, request: Request) -> None:
        """Drop the cached keys and values of ``request``, and those that were to come; it computes them."""
        request.forget()
        self._close_prefix(request)

    def _grow(self, request: Request) -> bool:
        """Take the block that the next token of ``request`` may need; False when it had to give up its own."""
        if request.cached < len(request.blocks) * self.block_tokens:
            return True
        while (blocks := self.pool.allocate(self._missing(request, request.cached + 1))) is None:
            if self._make_room():
                continue
            fixed = {chunk.request.number for chunk in self.planned}
            victim = self.victim([other for other in self.running if other.number not in fixed])
            self.preempt(victim)
            if victim is request:
                return False
        request.blocks += blocks
        return True

    def _follows_layers(self, request: Request) -> bool:
        """Return whether layers that ``request`` computes with are still to come."""
        version = request.version or self.preemptor.executor.version
        return version is not None and version.arrived < version.depth

    def _blocks(self, request: Request, tokens: int, shared: Sequence[int] = ()) -> list[int] | None:
        """The ``shared`` blocks and others for ``tokens`` tokens, or None where ``request`` cannot begin now."""
        if self.full >= self.config.requests:
            return None
        return self.pool.allocate(self._missing(request, tokens), admission=True, shared=shared)

    def _make_room(self) -> bool:
        """Take the blocks of the prompt that followed arriving layers last, which begins anew once there is room;
        return whether there was one."""
        fixed = {chunk.request.number for chunk in self.planned}
        for number, prefill in reversed(self.pending.items()):
            if isinstance(prefill, LayerwisePrefill) and number not in fixed:
                self.preempted += 1
                self._release(prefill.request)
                self._forget(prefill.request)
                self.requeue_first(prefill.request)
                return True
        return False

    def _shared(self, request: Request) -> list[int]:
        return [] if self.prefixes is None else self.prefixes.find(request)

    def _needs(self, waiting: Request) -> int:
        """Return the tokens to process once ``waiting`` is admitted."""
        return waiting.remaining - len(self._shared(waiting)) * self.block_tokens

    def _missing(self, request: Request, tokens: int) -> int:
        return max(0, -(-tokens // self.block_tokens) - len(request.blocks))

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
