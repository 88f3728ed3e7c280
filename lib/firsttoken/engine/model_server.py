"""Servers of a model, whatever that is made of: the one protocol that the HTTP service knows, and what all share.

Requests are taken from the first moment on, and wait until there is an engine. Whoever imports this has imported no
torch yet: the thread that loads does (:class:`LoadingServer`), and every import of torch is its own, so that no two
threads wait for each other's.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from firsttoken.engine.async_engine import AsyncEngine, EngineStats
from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import BLOCK_TOKENS, RequestLimits
from firsttoken.engine.stream import Stream, Submission, TokenSink, step_failure
from firsttoken.study.dtypes import check_device
from firsttoken.study.errors import (
    BusyError,
    ClosedError,
    FirstTokenError,
    PermanentFault,
    RequestError,
    StageError,
    first_line,
    permanent_faults,
)
from firsttoken.study.system.importing import without_collector
from firsttoken.study.system.openmp import loops_on_one_core

if TYPE_CHECKING:
    import torch
    from torch import nn

    from firsttoken.engine.engine import Engine
    from firsttoken.engine.executor import Version
    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken.engine.preemption.preemption_policy import Recovery
    from firsttoken.engine.scheduler_state import KVSource

Versions = Mapping[str, "Version"]  # variants of a model by name
NO_VERSIONS: Versions = MappingProxyType({})
T = TypeVar("T")

PAUSE_S = 0.01  # between two layers that are fused, which takes 10 ms each: a fused step takes a fifth of the other


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
        """Return the server's status for JSON: the ``stage`` that answers (0: none yet) of ``stages``, 1 of 1 for a
        model without any; the ``state``, the ``error`` or None, ``events`` so far, open ``sessions``, ``bytes_loaded``,
        ``bytes_total``."""

    def stats(self) -> EngineStats:
        """Return what the engine holds now; requests that wait for the model to be there count as waiting."""

    def close(self) -> None:
        """End every session, and whatever loads or computes."""


class EngineServer(ModelServer):
    """A server that keeps requests until there is an engine, then sends them on to it."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self._change = threading.Condition()
        self._open: dict[Stream, Submission] = {}
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
        sampling = sampling if isinstance(sampling, Sampling) else Sampling(sampling)
        submission = (prompt_ids, sampling, upgrade, variant, None)
        with self._change:
            if self._closing.is_set():
                raise self._permanent_fault or ClosedError("the server is shutting down")
            if len(self._open) >= (most := self.limits.max_sessions):
                raise BusyError(f"{most} requests are open, which is all that is served; try again later")
            session = Stream(self._leave, self._forget, events)
            self._open[session] = submission
            self._change.notify_all()
            if self._server is not None:
                self._server.add(session, *submission)
        return session

    def stats(self) -> EngineStats:
        with self._change:
            server, waiting = self._server, len(self._open)
        return EngineStats(waiting=waiting) if server is None else server.stats()

    def use_sources(self, find: Callable[[Sequence[int], str], KVSource | None]) -> None:
        """Begin requests with what ``find`` has of their prompts, by the variant that is asked, from the next step on.

        There is an engine, and another thread than the engine's calls this."""

        def counted(prompt: Sequence[int], variant: str) -> KVSource | None:
            source = find(prompt, variant)
            self._restored += source is not None
            return source

        server = self._server
        with suppress(RequestError):  # it is being closed
            server.call(lambda: setattr(server, "sources", counted))  # behind a version that was just published

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
        self,
        engine: Engine,
        limits: RequestLimits,
        ended: Callable[[], None],
        weights: int = 0,
        named: Versions = NO_VERSIONS,
    ) -> None:
        super().__init__(limits)
        self._ended, self._weights = ended, weights
        self._server: AsyncEngine = AsyncEngine(engine, versions=named)

    def status(self) -> dict[str, Any]:
        served = {
            "stage": 1,
            "stages": 1,
            "state": "complete",
            "error": None,
            "events": [],
            "sessions": len(self._open),
        }
        return served | {"bytes_loaded": self._weights, "bytes_total": self._weights}

    def close(self) -> None:
        with self._change:
            closed = self._closing.is_set()
            self._closing.set()
        if not closed:
            self._server.close(ClosedError("the server was closed"))
            self._ended()


class LoadingServer(EngineServer):
    """Serves a model that one thread loads, of all stages or the first, and then what else there is to be loaded.

    What fails ends it: nobody is served from then on, and whoever asks learns why. A subclass may try again
    (:meth:`_attempt`).
    """

    _bytes_moved = 0  # those of failed attempts included
    _recover = True  # to later stages, where there are any
    _first = 1  # the stage that is served before these

    def __init__(self, limits: RequestLimits, device: str) -> None:
        super().__init__(limits)
        self._device = device
        self._stage, self._stages, self._bytes_total = 0, 0, 0  # the stage that new requests begin with
        self._error, self._prepared = "", False
        self._events: list[dict[str, Any]] = []
        self._started_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._note(0, "started")
        self._thread = threading.Thread(target=self._load_and_serve, name="loading", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return what the protocol says, and how many requests were ``restored``; times are seconds since the start."""
        with self._change:
            stage = self._stage
            complete = bool(stage) and (stage == self._stages or not self._recover)
            before = "loading" if self._prepared else "starting"
            running = "complete" if complete else "recovering" if stage else before
            return {
                "stage": stage,
                "stages": self._stages,
                "state": "failed" if self._permanent_fault else "degraded" if self._error else running,
                "error": self._error or None,
                "events": list(self._events),
                "sessions": len(self._open),
                "restored": self._restored,
                "bytes_loaded": self._bytes_moved,
                "bytes_total": self._bytes_total,
            }

    def close(self) -> None:
        """End every session, the load that is under way, and both threads."""
        with self._change:
            self._closing.set()
        if self._thread is not None:
            self._thread.join()

    @abstractmethod
    def _read_ahead(self) -> None:
        """Begin to read what is loaded first, where that can be done without torch; it raises nothing."""

    @abstractmethod
    def _import(self) -> None:
        """Import what loads. Raises what an import raises."""

    @abstractmethod
    def _begin(self) -> bool:
        """Load what is served first and let requests run; True once it is whole. Raises what a load raises."""

    @abstractmethod
    def _continue_in_background(self) -> None:
        """Do what there is to do beside serving, until it is done or the server is being closed."""

    def _attempt(self, stage: int, load: Callable[[], T]) -> T | None:
        """Return what ``load`` brings for ``stage``; None when the server is being closed. Raises what it raises."""
        self._note(stage, "loading")
        try:
            return load()
        except Exception:
            if self._closing.is_set():
                return None
            raise

    def _note(self, stage: int, event: str, **more: float) -> None:
        """Remember that ``event`` happened to ``stage``, now."""
        self._events.append({"at_s": time.monotonic() - self._started_s, "stage": stage, "what": event} | more)

    def _load_and_serve(self) -> None:
        try:
            self._prepare()
            if self._attempt(self._first, self._begin):
                self._serving(self._first)
                self._continue_in_background()
                self._closing.wait()
        except Exception as error:
            if not self._closing.is_set():
                fault = error.fault if isinstance(error, PermanentFault) else error
                self._give_up(fault if isinstance(fault, FirstTokenError) else StageError(first_line(fault)))
                return
        self._end_all(ClosedError("the server was closed"))

    def _prepare(self) -> None:
        """Import what computes. Where that fails it would every time. Raises FirstTokenError."""
        try:
            self._read_ahead()
            fresh = "torch" not in sys.modules
            with without_collector() if fresh else nullcontext():  # what a process in mid-life holds may be garbage
                from firsttoken.engine import engine, live_executor  # noqa: F401

                self._import()
            check_device(self._device)
            self._prepared = True
        except FirstTokenError:
            raise
        except Exception as error:
            fault = f"what computes cannot be imported: {first_line(error)}"
            raise StageError(f"{fault}; install firsttoken again") from error

    def _give_up(self, fault: FirstTokenError) -> None:
        """Serve nobody from now on: clients that wait, and those that ask, learn of ``fault``."""
        self._error = str(fault)
        with self._change:
            self._permanent_fault = fault
            self._closing.set()
        self._end_all(fault)

    def _executor(self, model: nn.Module, device: torch.device) -> LiveExecutor:
        """Return an executor that runs ``model`` over a pool as large as the limits say. Raises PermanentFault."""
        from firsttoken.engine.live_executor import LiveExecutor

        limits = self.limits
        sizes = {"block_tokens": BLOCK_TOKENS, "host_blocks": limits.host_blocks}
        with permanent_faults():
            return LiveExecutor(model, limits.blocks, **sizes, device=device, touched=False)

    def _run(
        self,
        executor: LiveExecutor,
        failed: Callable[[Exception], Exception] = step_failure,
        recovered: Callable[[Recovery], None] | None = None,
        versions: Versions = NO_VERSIONS,
        final: Version | None = None,
    ) -> AsyncEngine:
        """Start the engine for the requests that wait and those that come; arguments as for :class:`Engine` and
        :class:`AsyncEngine`."""
        from firsttoken.engine.engine import Engine

        engine = Engine(executor, self.limits.engine, policy=self.limits.preemption, recovered=recovered)
        server = AsyncEngine(engine, failed, versions, final)
        loops_on_one_core()  # layers are fused in this thread while others are computed with
        with self._change:
            self._server = server
            for session, submission in self._open.items():
                server.add(session, *submission)
        return server

    def _serving(self, stage: int) -> None:
        with self._change:
            self._stage = stage
            self._note(stage, "serving")
            self._change.notify_all()

    def _fuse(self, fuse: Callable[[], Iterator[None]], release: Callable[[], None]) -> None:
        """Run ``fuse`` over one layer after another, with pauses in which steps have all cores to themselves, once
        ``release`` has let go of what else has them."""
        with suppress(FirstTokenError):  # the server is being closed
            self._server.call(release)
            for _ in fuse():
                if self._closing.wait(PAUSE_S):
                    return

    def _end_all(self, error: Exception) -> None:
        """End every open request with ``error``, in the engine or before it."""
        with self._change:
            server, self._server = self._server, None
            waiting = [session for session in self._open if session.request is None]
        if server is not None:
            server.close(error)
        for session in waiting if server is None else []:
            session.end(error)
