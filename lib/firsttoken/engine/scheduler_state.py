"""Which requests have which blocks: requests come, lose them, have them back, move to another view, and end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from firsttoken.engine.block_pool import BlockPool, PrefixSharing
from firsttoken.engine.executor import Executor, Version
from firsttoken.engine.preemption.preemption_policy import Action, Preemptor
from firsttoken.engine.request import KVSource, LayerRecompute, Phase, Request, ScheduledChunk
from firsttoken.study.errors import CacheError, FirstTokenError, ProfileError, RequestError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.policy_file import PolicyKind

if TYPE_CHECKING:
    from torch import Tensor


# Who is preempted when a block is missing.

Victim = Callable[[list[Request]], Request]

VICTIMS: dict[str, Victim] = {
    "last_arrived": lambda running: max(running, key=lambda request: request.order),  # LIFO, CPS 2.2
    "first_arrived": lambda running: min(running, key=lambda request: request.order),
    "longest": lambda running: max(running, key=lambda request: (request.cached, request.order)),
    "shortest": lambda running: min(running, key=lambda request: (request.cached, request.order)),
}

_NOT_ONE = "a victim must be one of the running requests that it is given"
VICTIM = PolicyKind(
    "victim",
    None,
    "write one function of the running requests that returns one of them, as in firsttoken.engine.scheduler_state",
    {"": lambda victim, running: "" if any(victim is one for one in running) else f"{_NOT_ONE}, not {victim!r:.60}"},
)


def victim_named(victim: str | Victim) -> Victim:
    """The choice of that name, or one's own. Raises ProfileError for a name that is unknown."""
    if isinstance(victim, str) and victim not in VICTIMS:
        raise ProfileError(f"engine: no victim choice {victim!r}; {unknown(victim, VICTIMS)}")
    return VICTIMS[victim] if isinstance(victim, str) else victim


# Where requests stand: four queues, one a phase.


class Queues:
    """``waiting`` (new, or to be recomputed; those go first), ``running`` and ``restoring`` (they have blocks),
    ``swapped``. Only here does a request's phase change: it is the queue that it stands in."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.restoring: list[Request] = []
        self.swapped: list[Request] = []
        self._queues: dict[Phase, deque[Request] | list[Request]] = {
            Phase.WAITING: self.waiting,
            Phase.RUNNING: self.running,
            Phase.RESTORING: self.restoring,
            Phase.SWAPPED: self.swapped,
        }

    @property
    def full(self) -> int:
        """Requests that have blocks."""
        return len(self.running) + len(self.restoring)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Requests in each of the queues."""
        return tuple(map(len, self._queues.values()))

    def sort_waiting(self, turn: Callable[[Request], Any]) -> None:
        """Whoever waits stands in the order of ``turn``, the least first."""
        ordered = sorted(self.waiting, key=turn)
        self.waiting.clear()
        self.waiting.extend(ordered)

    def move_to(self, request: Request, phase: Phase) -> None:
        """Move the request from the queue of its phase, if it is in it, to the end of the queue of ``phase``."""
        if request in self._queues[request.phase]:
            self._queues[request.phase].remove(request)
        request.phase = phase
        if phase is not Phase.FINISHED:
            self._queues[phase].append(request)

    def requeue_first(self, request: Request) -> None:
        """It waits before all who never ran."""
        self.move_to(request, Phase.WAITING)
        self.waiting.rotate(1)


# A cache from elsewhere: keys and values of how a request begins, computed by another model or at another time.


class PendingPrefix:
    """What ``source`` brings of how ``request`` begins, from its arrival until nothing more is wanted.

    The source is held to what it says: each layer of a model of ``depth`` layers (None: unknown, and not asked about)
    that is not computed again comes once, with keys and values of all its tokens, before it is complete. Raises
    RequestError for layers to compute again that the model does not have.
    """

    def __init__(self, request: Request, source: KVSource, depth: int | None) -> None:
        self.request, self.tokens, self._redo = request, source.tokens, source.redo
        redo = self._redo
        if depth is not None and (not 0 <= redo.start <= redo.stop <= depth or redo.step != 1):
            raise RequestError(f"a stored prefix recomputes layers {redo}, and the model has [0, {depth})")
        self._source = source
        self._left = None if depth is None else set(range(depth)) - set(redo)
        self.begun = self.closed = False

    def begin(self) -> None:
        """Let the source begin to bring its layers: the request has blocks for them."""
        self._source.begin()
        self.begun = True

    def close(self) -> None:
        """Nothing more is wanted of the source; may be called twice."""
        self.closed = True
        self._source.close()

    def bring(self, executor: Executor) -> bool:
        """Take in what has come; whether the request has something to compute now.

        That is what it computes again, as soon as this can begin, and what follows its prefix, once that is whole:
        then this is closed. Where the source fails, or brings what does not fit, everything is computed from the
        tokens, and ``request.fell_back`` says why.
        """
        request = self.request
        try:
            for layer, kv in self._arrived():
                executor.fill(request, layer, kv[..., : self.tokens, :])
            if request.computed < self.tokens:
                return self._start(executor)
            if request.redo is None and self._complete():
                self.close()
            return request.redo is not None or self.closed
        except FirstTokenError as error:
            request.forget()
            self.close()
            request.computed, request.fell_back = 0, str(error)
            return True

    def _start(self, executor: Executor) -> bool:
        request, redo = self.request, self._redo
        if not redo:
            if self._complete():
                request.advance(self.tokens)
                self.close()
            return self.closed
        hidden_states = self._source.hidden_states() if redo.start else None
        if redo.start and hidden_states is None:
            return False
        hidden = None if hidden_states is None else executor.hidden_states_of(hidden_states, self.tokens)
        request.computed = self.tokens
        request.redo = LayerRecompute(redo, self.tokens, hidden)
        return True

    def _arrived(self) -> list[tuple[int, Tensor]]:
        """The layers that have come since the last call. Raises CacheError unless each comes once and whole."""
        came = self._source.arrived()
        for layer, kv in came if self._left is not None else ():
            if layer not in self._left:
                raise CacheError(f"a stored prefix brought layer {layer} twice or unasked; store it again")
            if kv.dim() != 5 or kv.shape[3] < self.tokens:
                raise CacheError(f"a stored prefix brought {list(kv.shape)} of {self.tokens} tokens for layer {layer}")
            self._left.remove(layer)
        return came

    def _complete(self) -> bool:
        """Whether the source is complete. Raises CacheError where it is and has not brought every layer."""
        if (complete := self._source.complete) and self._left:
            raise CacheError(f"a stored prefix ended without layer {min(self._left)}; store it again")
        return complete


class SchedulerState(Queues):
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
        self.planned: list[ScheduledChunk] = []  # for the coming step, by now
        self.preempted = 0  # how often so far
        self.pending: dict[int, PendingPrefix] = {}  # by the number of the request that it is of

    @property
    def awaiting(self) -> bool:
        """Whether anybody has blocks, and a prefix on its way into them."""
        return any(prefix.begun for prefix in self.pending.values())

    def expect(self, request: Request, source: KVSource, depth: int | None) -> None:
        """``source`` brings what ``request``, which is about to arrive, begins with. Raises as PendingPrefix."""
        self.pending[request.number] = PendingPrefix(request, source, depth)

    def add(self, request: Request) -> None:
        """A new request."""
        self.move_to(request, Phase.WAITING)

    def collect(self, *, wait: bool = False) -> None:
        """Requests whose keys and values have come run; with ``wait``, wait for the first that comes back."""
        for prefix in [prefix for prefix in self.pending.values() if prefix.begun]:
            request = prefix.request
            phase = Phase.RUNNING if prefix.bring(self.preemptor.executor) else Phase.RESTORING
            if prefix.closed:
                del self.pending[request.number]
            if phase is not request.phase:
                self.move_to(request, phase)
        for request in [request for request in self.restoring if request.number not in self.pending]:
            if self.preemptor.poll(request, wait=wait):
                self.move_to(request, Phase.RUNNING)
                wait = False

    def end(self, request: Request) -> None:
        """The request is over, wherever it stands; its blocks are free again. Raises DeviceLost, once it is."""
        try:
            self._give_up_prefix(request)
            self.preemptor.forget(request)
        finally:
            self._release(request)
            self.move_to(request, Phase.FINISHED)

    def preempt(self, victim: Request) -> None:
        """Take the blocks of ``victim`` away; it waits, before all who never ran, or is swapped out."""
        self.preempted += 1
        action = self.preemptor.evict(victim)
        self._release(victim)
        if action is Action.SWAP:
            self.move_to(victim, Phase.SWAPPED)
        else:
            self._give_up_prefix(victim)
            self.requeue_first(victim)

    def move(self, request: Request, version: Version, layers: range) -> None:
        """``request``, which has begun, computes with ``version`` from now on, and ``layers`` again under the budgets
        of the coming steps. Raises RequestError where hidden states that this begins with were not kept."""
        if request.number in self.pending:  # what was to come would be of another view
            self._forget(request)
            request.computed, request.fell_back = 0, "the model changed while its stored prefix was on its way"
        again = bool(layers) and (request.cached > 0 or request.redo is not None)
        elsewhere = request.phase is Phase.SWAPPED or self.prefixes is not None  # or in blocks that others read too
        redo = request.version.redo(request, layers) if again and not elsewhere else request.redo
        version.adopt(request)
        if not again:
            if self.prefixes is not None:
                self.prefixes.part(request)
            if request.phase is Phase.RESTORING and request.host is None:
                self.move_to(request, Phase.RUNNING)
        else:
            self.preemptor.move(request)
            if elsewhere:
                self._release(request)
                self._forget(request)
                self.requeue_first(request)
            else:
                self.move_to(request, Phase.RUNNING)
        request.switch_to(version, None if again and elsewhere else redo)

    def lose(self) -> list[Request]:
        """The device is lost, with all keys and values: who had any there, or in its host, waits before all who never
        ran, and computes them again. Those requests, the first come first."""
        self.pool.forget()
        had = sorted([*self.running, *self.restoring, *self.swapped], key=lambda request: request.order)
        for request in reversed(had):
            self.preemptor.lose(request)
            self._give_up_prefix(request)
            self._release(request)
            self.requeue_first(request)
        return had

    def _await(self, request: Request) -> None:
        """Its prefix comes from elsewhere; nobody else may share what is computed upon it."""
        if self.prefixes is not None:
            self.prefixes.part(request)
        prefix = self.pending.pop(request.number)
        self.pending[request.number] = prefix  # behind those that began before
        prefix.begin()
        self.move_to(request, Phase.RESTORING)

    def _give_up_prefix(self, request: Request) -> None:
        """Nothing more is wanted from elsewhere."""
        if (prefix := self.pending.pop(request.number, None)) is not None:
            prefix.close()

    def _forget(self, request: Request) -> None:
        """Its keys and values are gone, and those that were to come are not wanted; it computes them."""
        request.forget()
        self._give_up_prefix(request)

    def _grow(self, request: Request) -> bool:
        """Take the block that the next token of ``request`` may need; False when it had to give up its own."""
        if request.cached < len(request.blocks) * self.block_tokens:
            return True
        while (blocks := self.pool.take(self._missing(request, request.cached + 1))) is None:
            fixed = {chunk.request.number for chunk in self.planned}
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
        return waiting.remaining - len(self._shared(waiting)) * self.block_tokens

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
        absent = {block for chunk in self.planned for block in self.prefixes.withdraw(chunk)}
        for request in sorted(self.running, key=lambda request: request.order, reverse=True):
            if not absent.isdisjoint(request.blocks[: request.cached // self.block_tokens]):
                self._release(request)
                self._forget(request)
                self.requeue_first(request)
