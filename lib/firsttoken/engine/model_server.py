"""What serves a model, whatever that is made of: the one protocol that the HTTP service knows, and what all share.

Requests are taken from the first moment on, and wait until there is an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from firsttoken.engine.async_engine import Asked, AsyncEngine, EngineStats, Stream, TokenSink
from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.study.errors import ClosedError, FirstTokenError, RequestError

if TYPE_CHECKING:
    from firsttoken.engine.engine import Engine
    from firsttoken.engine.executor import Version
    from firsttoken.engine.request import KVSource

Versions = Mapping[str, "Version"]  # variants of a model by name
NONE: Versions = MappingProxyType({})


class ModelServer(Protocol):
    """A model that is served, within ``limits``: in stages or whole, in this process or in others."""

    limits: RequestLimits

    def start(self) -> None:
        """Begin to load, where anything is still to be loaded; it returns at once."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | int,
        upgrade: bool = False,
        events: TokenSink | None = None,
        variant: str = "",
    ) -> Stream:
        """Open a generation; a number is as many greedy tokens. ``upgrade`` moves it to a better stage when one comes,
        else it ends as it began. A ``variant`` of the model answers, by its name.

        Its tokens go to ``events`` if given, else the stream has them; who leaves cancels the stream. Returns at once.
        Raises RequestError for a prompt or a length outside the limits and BusyError when all places are taken; what
        the model cannot take, and what goes wrong later, the stream raises.
        """

    def status(self) -> dict[str, Any]:
        """What JSON says of it: the ``stage`` that answers (0: none yet) of ``stages``, 1 of 1 for a model without any;
        the ``state``, the ``error`` or None, ``events`` so far, open ``sessions``, ``bytes_loaded``, ``bytes_total``.
        """

    def stats(self) -> EngineStats:
        """What the engine holds now; what waits for the model to be there waits there."""

    def swarm_status(self) -> dict[str, Any] | None:
        """Tell who holds which blocks of the model; None where they are all here."""

    def close(self) -> None:
        """End every session, and whatever loads or computes."""


class EngineServer(ModelServer):
    """Keeps who comes until there is an engine, then sends them on to it."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self._change = threading.Condition()
        self._open: dict[Stream, Asked] = {}
        self._server: AsyncEngine | None = None
        self._closing = threading.Event()
        self._permanent_fault: FirstTokenError | None = None  # why nobody will ever be served
        self._restored = 0  # requests that began with a stored prefix

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | int,
        upgrade: bool = False,
        events: TokenSink | None = None,
        variant: str = "",
    ) -> Stream:
        self.limits.check(len(prompt_ids), sampling.max_tokens if isinstance(sampling, Sampling) else sampling)
        asked = prompt_ids, sampling if isinstance(sampling, Sampling) else Sampling(sampling), upgrade, variant, None
        with self._change:
            if self._closing.is_set():
                raise self._permanent_fault or ClosedError("the server is shutting down")
            self.limits.check_room(len(self._open))
            session = Stream(self._leave, self._forget, events)
            self._open[session] = asked
            self._change.notify_all()
            if self._server is not None:
                self._server.add(session, *asked)
        return session

    def stats(self) -> EngineStats:
        with self._change:
            server, waiting = self._server, len(self._open)
        return EngineStats(waiting=waiting) if server is None else server.stats()

    def swarm_status(self) -> dict[str, Any] | None:
        return None

    def take_prefixes(self, find: Callable[[Sequence[int], str], KVSource | None]) -> None:
        """Begin requests with what ``find`` has of their prompts, by the variant that is asked, from the next step on.

        There is an engine, and another thread than the engine's calls this."""

        def counted(prompt: Sequence[int], variant: str) -> KVSource | None:
            source = find(prompt, variant)
            self._restored += source is not None
            return source

        server = self._server
        with suppress(RequestError):  # it is being closed
            server.between(lambda: setattr(server, "sources", counted))  # behind a version that was just published

    def _leave(self, session: Stream, wait: bool) -> None:
        with self._change:
            server = self._server
        if server is not None:
            server.leave(session, wait)
        else:
            session.end()

    def _forget(self, session: Stream) -> None:
        with self._change:
            self._open.pop(session, None)


class StaticServer(EngineServer):
    """Serves what ``engine`` runs, which is there from the beginning with ``weights`` bytes, wherever they are;
    ``ended`` is called when it is closed, and variants of the model are asked for as they are ``named``."""

    def __init__(
        self, engine: Engine, limits: RequestLimits, ended: Callable[[], None], weights: int = 0, named: Versions = NONE
    ) -> None:
        super().__init__(limits)
        self._ended, self._weights = ended, weights
        self._server: AsyncEngine = AsyncEngine(engine, limits.max_sessions, versions=named)

    def status(self) -> dict[str, Any]:
        there = {"stage": 1, "stages": 1, "state": "complete", "error": None, "events": [], "sessions": len(self._open)}
        return there | {"bytes_loaded": self._weights, "bytes_total": self._weights}

    def close(self) -> None:
        with self._change:
            closed = self._closing.is_set()
            self._closing.set()
        if not closed:
            self._server.close(ClosedError("the server was closed"))
            self._ended()
