"""The engine's side of a worker: an executor that sends each step's work as bytes and takes its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, NoReturn

from firsttoken.engine.apart.config import WorkerConfig
from firsttoken.engine.apart.nursery import Nursery, WorkerGone
from firsttoken.engine.apart.process import WorkerProcess
from firsttoken.engine.apart.told import Told
from firsttoken.engine.apart.wire import WorkerOrder, chances_of, pack, reply_of
from firsttoken.engine.chances import no_number
from firsttoken.engine.executor import DeviceLost, Limits
from firsttoken.engine.request import Request
from firsttoken.engine.swap.path import Moved, Movement
from firsttoken.engine.swap.spans import Span
from firsttoken.engine.work import Work
from firsttoken.study import errors
from firsttoken.study.errors import CacheError, FirstTokenError, WorkerError


class ApartExecutor:
    """Runs steps in a worker process, which hosts a LiveExecutor as ``config`` says.

    A worker that is lost is ended and another started at once; then DeviceLost is raised. Views and caches from
    elsewhere are of one process only. Raises WorkerError for a worker that does not start, and what it says of a model
    that it cannot host.
    """

    view = None
    salt = ""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.block_tokens = config.block_tokens
        self.blocks = config.blocks
        self.lost = 0  # workers so far
        self._serials = count(1)
        self._nursery = Nursery()
        self.worker: WorkerProcess | None = None
        try:
            self._start()
        except WorkerGone as gone:
            self.close()
            raise WorkerError(f"{gone}; it was to host {config.model}") from gone
        except BaseException:
            self.close()
            raise

    def now(self) -> float:
        """The machine's monotonic clock."""
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        """Sleep until ``moment_s``."""
        time.sleep(max(0.0, moment_s - self.now()))

    def execute(self, works: Sequence[Work]) -> list[int]:
        """The step, over there. Raises DeviceLost, and what the worker's own executor raises."""
        tokens, chances, failed = self._ask("step", lambda: [self._told.work(work) for work in works])
        vocabulary = self.limits.vocabulary
        if len(tokens) != len(works) or any(type(one) is not int or not 0 <= one < vocabulary for one in tokens):
            self._replace("the worker has answered nonsense")
        for row, said, judged in chances:
            works[row].request.chances += chances_of(said)
            works[row].request.prompt_chances += chances_of(judged)
        for row in failed:
            works[row].request.failure = no_number()
        return tokens

    def swap_out(self, request: Request) -> Moved | None:
        """Copy what the request has cached to the worker's host pool; None when that is full, or there is none."""
        if not self.config.host_blocks:
            return None
        found = self._ask("out", lambda: [request.number, request.cached, request.blocks])
        if found is None:
            return None
        self._told.lies_in(request)
        request.host = Span(*found[:2])
        return Moved(*found[2:])

    def swap_in(self, request: Request) -> Movement:
        """Begin to copy it back."""
        host = request.host
        found = self._ask("in", lambda: [request.number, host.start, host.blocks, request.blocks])
        self._told.lies_in(request)
        return _Returning(self, request.number, found and Moved(*found))

    def arrived(self, number: int, wait: bool) -> Moved | None:
        """What the way back of that request took; None while it is under way, which it is not after a ``wait``."""
        found = self._ask("arrived", lambda: [number, wait])
        return found and Moved(*found)

    def drop(self, host: Span) -> None:
        """Give the span back to the host pool, with the next order."""
        self._told.dropped(host)

    def forget(self, request: Request) -> None:
        """Drop what is kept of it, with the next order."""
        self._told.over(request)

    def fill(self, request: Request, layer: int, kv: object) -> NoReturn:
        """Raises CacheError: what is brought from elsewhere is computed instead."""
        raise CacheError("a worker process takes no keys and values from elsewhere")

    def edge_of(self, hidden: object, tokens: int) -> NoReturn:
        """Raises CacheError as ``fill``."""
        raise CacheError("a worker process takes no hidden states from elsewhere")

    def close(self) -> None:
        """End the worker, and where it comes from."""
        self._end()
        self._nursery.close()

    def _start(self) -> None:
        """Raises WorkerGone, and what the worker says of the model."""
        self._told = Told()
        self.worker = WorkerProcess(self._nursery, self.config.start_s)
        try:
            self.limits = Limits(*self._say("host", asdict(self.config), self.config.start_s))
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _ask(self, what: str, content: Any) -> Any:
        if self.worker is None and (fault := self._fault_of_start()):
            raise DeviceLost(fault, self.config.retries)
        try:
            return self._say(what, content(), self.config.step_s)
        except WorkerGone as gone:
            self._replace(str(gone))

    def _say(self, what: str, content: Any, timeout_s: float) -> Any:
        """The worker's answer to an order. Raises WorkerGone, and the exception that it raised."""
        serial = next(self._serials)
        self.worker.send(pack(WorkerOrder(serial, what, *self._told.forgotten(), content)))
        try:
            reply = reply_of(self.worker.receive(timeout_s))
        except WorkerError as error:
            raise WorkerGone(f"the worker has answered nonsense: {error}") from error
        if reply.serial != serial:
            raise WorkerGone("the worker has answered another order")
        if reply.fault:
            kind = getattr(errors, reply.fault, None)
            if isinstance(kind, type) and issubclass(kind, FirstTokenError):
                raise kind(reply.content)
            raise WorkerError(f"the worker met {reply.fault}: {reply.content}")
        return reply.content

    def _replace(self, why: str) -> NoReturn:
        """Raises DeviceLost, with another worker in the place of the one that is lost, if one starts."""
        self.lost += 1
        self._end()
        raise DeviceLost("; ".join(filter(None, (why, self._fault_of_start()))), self.config.retries)

    def _fault_of_start(self) -> str:
        """Why no worker starts; nothing where one does."""
        try:
            self._start()
        except (WorkerGone, FirstTokenError) as error:
            return f"no worker starts: {error}"
        return ""


class _Returning(Movement):
    """A way back in the worker; ``moved`` once it has ended."""

    def __init__(self, executor: ApartExecutor, number: int, moved: Moved | None) -> None:
        self._executor, self._number, self._moved = executor, number, moved

    @property
    def done(self) -> bool:
        self._moved = self._moved or self._executor.arrived(self._number, wait=False)
        return self._moved is not None

    def wait(self) -> Moved:
        self._moved = self._moved or self._executor.arrived(self._number, wait=True)
        return self._moved
