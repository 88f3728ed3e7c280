"""The queues that requests stand in, and what comes from elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from firsttoken.engine.executor import Executor
from firsttoken.engine.request import LayerRecompute, Phase, Request
from firsttoken.study.errors import CacheError, FirstTokenError, RequestError

if TYPE_CHECKING:
    from torch import Tensor


# Where requests stand: five queues, one a phase.


class Queues:
    """``waiting`` (new, or to be recomputed; those go first), ``running`` and ``restoring`` (they have blocks),
    ``swapped``, ``drafted`` (they wait for another version). Only here does a request's phase change: it is the queue
    that it stands in."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.restoring: list[Request] = []
        self.swapped: list[Request] = []
        self.drafted: list[Request] = []
        self._queues: dict[Phase, deque[Request] | list[Request]] = {
            Phase.WAITING: self.waiting,
            Phase.RUNNING: self.running,
            Phase.RESTORING: self.restoring,
            Phase.SWAPPED: self.swapped,
            Phase.DRAFTED: self.drafted,
        }

    @property
    def full(self) -> int:
        """Return the number of requests that have blocks."""
        return len(self.running) + len(self.restoring)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of requests in each of the queues."""
        return tuple(map(len, self._queues.values()))

    def sort_waiting(self, turn: Callable[[Request], Any]) -> None:
        """Sort the waiting requests by ``turn``, the least first."""
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
        """Move ``request`` to the head of the waiting queue, before all requests that never ran."""
        self.move_to(request, Phase.WAITING)
        self.waiting.rotate(1)


# A cache from elsewhere: keys and values of how a request begins, computed by another model or at another time.


class KVSource(Protocol):
    """A source of what is stored of the first ``tokens`` tokens of a request; the layers in ``redo`` are computed
    again.

    A source brings the hidden states that enter the first of these, if they are not the embedding's, and then every
    other layer's keys and values. The engine's thread asks it between two steps and never waits for it.
    """

    tokens: int
    redo: range

    def begin(self) -> None:
        """Begin to bring what is stored."""

    def hidden_states(self) -> Tensor | None:
        """The hidden states [1, tokens or more, hidden] that enter the first of ``redo``, once they are there.

        Raises FirstTokenError when they will not come any more.
        """

    def arrived(self) -> list[tuple[int, Tensor]]:
        """Return the (layer, keys and values [2, 1, kv_heads, tokens or more, head_dim]) that have come since the last
        call.

        Raises FirstTokenError when no more will come, and not all has.
        """

    @property
    def complete(self) -> bool:
        """Return whether ``arrived`` has told of every layer that is not computed again."""

    def close(self) -> None:
        """Stop bringing, as nothing more is wanted; may be called twice."""


class PendingPrefix:
    """The stored beginning of ``request`` that ``source`` brings, from its arrival until nothing more is wanted.

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
        self._missing_layers = None if depth is None else set(range(depth)) - set(redo)
        self.begun = self.closed = False

    def begin(self) -> None:
        """Let the source begin to bring its layers: the request has blocks for them."""
        self._source.begin()
        self.begun = True

    def close(self) -> None:
        """Close the source, of which nothing more is wanted; may be called twice."""
        self.closed = True
        self._source.close()

    def poll(self, executor: Executor) -> bool:
        """Take in the layers that have come, and return whether the request has something to compute now.

        That is what it computes again, as soon as this can begin, and what follows its prefix, once that is whole: then
        this is closed. Where the source fails, or brings what does not fit, everything is computed from the tokens, and
        ``request.fell_back`` says why.
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
        for layer, kv in came if self._missing_layers is not None else ():
            if layer not in self._missing_layers:
                raise CacheError(f"a stored prefix brought layer {layer} twice or unasked; store it again")
            if kv.dim() != 5 or kv.shape[3] < self.tokens:
                raise CacheError(f"a stored prefix brought {list(kv.shape)} of {self.tokens} tokens for layer {layer}")
            self._missing_layers.remove(layer)
        return came

    def _complete(self) -> bool:
        """Return whether the source is complete. Raises CacheError where it is and has not brought every layer."""
        if (complete := self._source.complete) and self._missing_layers:
            raise CacheError(f"a stored prefix ended without layer {min(self._missing_layers)}; store it again")
        return complete


# Prefill behind the layers: a model that is still arriving computes what it has.


class LayerwisePrefill:
    """The prefill of ``request`` through the layers of its version as they arrive: all tokens through those that are
    there, and, from the hidden states that leave them, through the next ones. The last ones say the first token.

    It stands among pending prefixes, of which a request has nothing to compute either until more has come.
    """

    def __init__(self, request: Request) -> None:
        from firsttoken.engine.hidden_state_cache import HiddenStateCache  # here: it imports torch

        self.request, self._reached, self._states = request, 0, HiddenStateCache(())
        self.begun = self.closed = False

    def begin(self) -> None:
        """Note that the request has blocks for all its tokens."""
        self.begun = True

    def close(self) -> None:
        """Note that the request follows no more layers; may be called twice."""
        self.closed = True

    def poll(self, executor: Executor) -> bool:
        """Return whether the request has something to compute: it is on its way through some layers, or more have
        come. This is closed once it is on its way through the last."""
        request, version, number = self.request, self.request.version, self.request.number
        if request.redo is not None:
            return True
        first, last = self._reached, version.arrived
        request.cached = request.computed = 0  # in the layers to come
        if last <= first:
            return False
        hidden = self._states.of(number, first) if first else None
        self._states.drop(number)
        self._reached, self.closed = last, last == version.depth
        leave = partial(self._states.keep, number, last)
        request.redo = LayerRecompute(range(first, last), len(request.tokens), hidden, leave, self.closed)
        return True
