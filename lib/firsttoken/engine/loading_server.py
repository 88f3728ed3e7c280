"""What serves a model that one thread loads, with requests waiting or answered by numpy until there is an engine.

Whoever imports this has imported no torch yet: that thread does, and every import of torch is its own, so that no two
threads wait for each other's.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from firsttoken.assets.lock import first_line
from firsttoken.engine.async_engine import AsyncEngine, step_failure
from firsttoken.engine.model_server import NONE, EngineServer, Versions
from firsttoken.engine.numpy_answers import NumpyAnswers
from firsttoken.engine.numpy_model import NumpyModel
from firsttoken.engine.request_limits import BLOCK_TOKENS, RequestLimits
from firsttoken.lean.importing import uncollected
from firsttoken.study.dtypes import check_device
from firsttoken.study.errors import ClosedError, FirstTokenError, StageError
from firsttoken.study.system.openmp import loops_on_one_core

if TYPE_CHECKING:
    import torch
    from torch import nn

    from firsttoken.engine.live_executor import LiveExecutor
    from firsttoken.engine.preemption.preemption_policy import Recovery

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0
PAUSE_S = 0.01  # between two layers that are fused, which takes 10 ms each: a fused step takes a fifth of the other


class PermanentFault(Exception):
    """Why a load fails each time: ``fault`` follows from files that do not change by themselves."""

    def __init__(self, fault: FirstTokenError) -> None:
        super().__init__(str(fault))
        self.fault = fault


@contextmanager
def files_alone() -> Iterator[None]:
    """Inside the block nothing is brought: what a user could mend there does not pass. Raises PermanentFault."""
    try:
        yield
    except FirstTokenError as error:
        raise PermanentFault(error) from error


class LoadingServer(EngineServer):
    """Serves a model that one thread loads, of all stages or the first, and then what else there is to be loaded.

    What fails is tried again after ``retry_s`` seconds, and after twice as long each further time, up to a minute; each
    failure is a line on the terminal. ``broken`` is told, by that thread, of what leaves no hope: something that
    computes cannot be imported, or the files are of no model that can be served. ``comes`` is the model that answers
    until torch is imported.
    """

    _bytes_moved = 0  # those of failed attempts included
    _recover = True  # to later stages, where there are any
    _first = 1  # the stage that is served before these

    def __init__(
        self,
        limits: RequestLimits,
        device: str,
        retry_s: float,
        broken: Callable[[FirstTokenError], None],
        comes: Future[NumpyModel] | None = None,
    ) -> None:
        super().__init__(limits)
        self._numpy = None if comes is None else NumpyAnswers(comes, self._change, self._open)
        self._device, self._retry_s, self._broken = device, retry_s, broken
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

    def _read_on(self, answers: NumpyAnswers) -> None:
        """Begin to read what comes behind the weights that ``answers`` compute with, while torch is imported: nothing,
        unless there are stages."""

    @abstractmethod
    def _import(self) -> None:
        """Import what loads. Raises what an import raises."""

    @abstractmethod
    def _begin(self) -> bool:
        """Load what is served first and let requests run; True once it is whole. Raises what a load raises."""

    @abstractmethod
    def _go_on(self) -> None:
        """What there is to do beside serving, until it is done or the server is being closed."""

    def _note(self, stage: int, what: str, **more: float) -> None:
        """Remember that ``what`` happened to ``stage``, now."""
        self._events.append({"at_s": time.monotonic() - self._started_s, "stage": stage, "what": what} | more)

    def _load_and_serve(self) -> None:
        if not self._prepare():
            return
        try:
            there = self._insist(self._first, self._begin, self._end_all)
        except PermanentFault as error:
            self._give_up(error.fault)
            return
        if there:
            self._serving(self._first)
            self._go_on()
            self._closing.wait()
        self._end_all(ClosedError("the server was closed"))

    def _prepare(self) -> bool:
        """Import what computes. Where that fails it would every time: nobody is served, and whoever asks learns why."""
        try:
            if self._numpy is None or not self._numpy.begin():
                self._read_ahead()
            else:
                self._read_on(self._numpy)
            fresh = "torch" not in sys.modules
            with uncollected() if fresh else nullcontext():  # what a process in mid-life holds may be garbage
                from firsttoken.engine import engine, live_executor  # noqa: F401

                self._import()
            check_device(self._device)
            self._prepared = True
            return True
        except FirstTokenError as error:
            self._give_up(error)
        except Exception as error:
            fault = f"what computes cannot be imported: {first_line(error)}"
            self._give_up(StageError(f"{fault}; install firsttoken again"))
        return False

    def _give_up(self, fault: FirstTokenError) -> None:
        """Nobody is served from now on: who waits, and who asks, learns of ``fault``."""
        self._error = str(fault)
        with self._change:
            self._permanent_fault = fault
            self._closing.set()
        self._end_all(fault)
        self._broken(fault)

    def _insist(
        self, stage: int, attempt: Callable[[], T], failed: Callable[[Exception], None] = lambda error: None
    ) -> T | None:
        """What ``attempt`` returns, called until it raises nothing, ``failed`` after each time it does. Raises
        PermanentFault.

        None when the server is closed first. Any kind of exception is caught: a thread that dies would leave its
        clients waiting for ever.
        """
        pause = self._retry_s
        while not self._closing.is_set():
            self._note(stage, "loading")
            try:
                there = attempt()
                self._error = ""
                return there
            except Exception as error:
                if self._closing.is_set():
                    break
                self._error = f"stage {stage}: {first_line(error)}"
                self._note(stage, f"failed: {first_line(error)}")
                if isinstance(error, PermanentFault):
                    raise
                print(f"firsttoken: {self._error}; it is tried again in {pause:g} s", file=sys.stderr, flush=True)
                failed(error)
                self._closing.wait(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)
        return None

    def _executor(self, model: nn.Module, device: torch.device) -> LiveExecutor:
        """What runs ``model`` over a pool as large as the limits say. Raises PermanentFault."""
        from firsttoken.engine.live_executor import LiveExecutor

        limits = self.limits
        sizes = {"block_tokens": BLOCK_TOKENS, "host_blocks": limits.host_blocks}
        with files_alone():
            return LiveExecutor(model, limits.blocks, **sizes, device=device, touched=False)

    def _run(
        self,
        executor: LiveExecutor,
        failed: Callable[[Exception], Exception] = step_failure,
        recovered: Callable[[Recovery], None] | None = None,
        versions: Versions = NONE,
    ) -> AsyncEngine:
        """Let requests run, those that wait and those that come; as :class:`Engine` and :class:`AsyncEngine` are
        told."""
        from firsttoken.engine.engine import Engine

        policy = self.limits.preemption
        if policy is not None and (told := policy.prepare(executor, executor.dtype)):
            print(f"firsttoken: {told}", file=sys.stderr, flush=True)
            self._note(1, told)
        engine = Engine(executor, self.limits.engine, policy=self.limits.preemption, recovered=recovered)
        server = AsyncEngine(engine, self.limits.max_sessions, failed, versions)
        loops_on_one_core()  # layers are fused in this thread while others are computed with
        with self._change:
            self._server = server
            for session, asked in self._open.items():
                server.add(session, *asked)
        return server

    def _serving(self, stage: int) -> None:
        with self._change:
            self._stage = stage
            self._note(stage, "serving")
            self._change.notify_all()

    def _fuse(self, fuse: Callable[[], Iterator[None]], release: Callable[[], None]) -> None:
        """What ``fuse`` does to one layer after another, with pauses in which steps have all cores to themselves, once
        ``release`` has let go of what else has them."""
        with suppress(FirstTokenError):  # the server is being closed
            self._server.between(release)
            for _ in fuse():
                if self._closing.wait(PAUSE_S):
                    return

    def _end_numpy(self) -> None:
        """End answers without torch. Their model is freed once the engine has copied its keys and values."""
        if self._numpy is not None:
            self._numpy.end()
            self._numpy = None

    def _end_all(self, error: Exception) -> None:
        """Whoever is open ends with ``error``, in the engine or before it."""
        if self._numpy is not None:
            self._numpy.close()
            self._numpy = None
        with self._change:
            server, self._server = self._server, None
            waiting = [session for session in self._open if session.request is None]
        if server is not None:
            server.close(error)
        for session in waiting if server is None else []:
            session.end(error)
