"""The engine in a thread of its own: clients submit from anywhere and read their tokens as they come."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from firsttoken.engine.request import GREEDY, Sampling
from firsttoken.engine.stream import Stream, Submission, TokenEvent, step_failure
from firsttoken.study.errors import BusyError, RequestError
from firsttoken.study.system.openmp import give_back_threads

if TYPE_CHECKING:
    from firsttoken.engine.engine import Engine
    from firsttoken.engine.executor import Transition, Version
    from firsttoken.engine.scheduler_state import KVSource


@dataclass(frozen=True)
class EngineStats:
    """The numbers of requests that run and that wait (also for stored keys and values), and of the KV blocks they
    have."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks: int = 0


class AsyncEngine(AbstractContextManager["AsyncEngine"]):
    """Steps ``engine`` in a thread of its own while requests are open. A context manager.

    Only that thread touches the engine. What others ask for is done between two steps, so a submission waits for one.
    ``failed`` turns what a step raises into what open clients are told; it may wait. ``sources``, once set, says what
    is stored of how a prompt to a variant begins; only the engine's thread asks it. ``versions`` are variants of the
    model by name, as far as they serve already. Requests of which nobody reads drafts begin with ``final``, the whole
    model, though its layers are still arriving.
    """

    def __init__(
        self,
        engine: Engine,
        failed: Callable[[Exception], Exception] = step_failure,
        versions: Mapping[str, Version] = MappingProxyType({}),
        final: Version | None = None,
    ) -> None:
        self._engine, self._first = engine, engine.executor.version
        self._failed = failed
        self.versions, self._final = versions, final
        self._streams: dict[int, Stream] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._closed = False
        self.sources: Callable[[Sequence[int], str], KVSource | None] | None = None
        give_back_threads()  # of who will wait from now on, for the engine's
        self._thread = threading.Thread(target=self._loop, name="firsttoken-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Stream:
        """Begin a request. Raises RequestError for one that can never run."""
        stream = Stream(self.leave)
        self.call(lambda: self._accept(stream, (prompt, sampling, False, "", None)))
        return stream

    def add(
        self,
        stream: Stream,
        prompt: Sequence[int],
        sampling: Sampling,
        moves: bool,
        variant: str = "",
        source: KVSource | None = None,
    ) -> None:
        """Begin the request of ``stream`` before the next step without waiting for it; an error becomes the stream's
        end. With ``moves`` it moves to better versions of the model; a ``variant`` is the name of one. ``source``
        brings how it begins, where that is known already."""

        def accept() -> None:
            try:
                self._accept(stream, (prompt, sampling, moves, variant, source))
            except Exception as error:
                stream.end(error)

        self.call_soon(accept)

    def leave(self, stream: Stream, wait: bool) -> None:
        """End the request of ``stream``, whose client goes; with ``wait``, return once it has ended."""
        if stream.request is not None and stream.request.finished:
            return
        (self.call if wait else self.call_soon)(lambda: self._drop(stream))

    def publish(self, version: Version, transition: Transition) -> None:
        """Do what :meth:`Engine.publish` does; called between two steps. A request that cannot move is told why."""
        for request, error in self._engine.publish(version, transition):
            self._streams.pop(request.number).end(error)

    def call(self, action: Callable[[], Any]) -> Any:
        """Let the engine's thread call ``action`` between two steps, and return or raise what that returns or
        raises."""
        answer = self.call_soon(action)
        while True:
            try:
                # The thread may end before it comes to this wish, and nobody answers then: hence the look every second.
                return answer.result(timeout=1)
            except TimeoutError:
                if not self._thread.is_alive():
                    raise RequestError("the server is closed; start another") from None

    def call_soon(self, action: Callable[[], Any]) -> Future:
        """Let the engine's thread call ``action`` between two steps."""
        answer: Future = Future()
        self._calls.put((action, answer))
        return answer

    def stats(self) -> EngineStats:
        """Return what the engine holds. Each number is right, but they may be of two moments."""
        held, pool = self._engine.scheduler, self._engine.pool
        running, away = len(held.running), len(held.swapped) + len(held.restoring) + len(held.drafted)
        return EngineStats(running, len(held.waiting) + away, pool.count - pool.free, pool.count)

    def close(self, error: Exception | None = None) -> None:
        """End every open request with ``error``, and the thread."""
        error = error or RequestError("the server was closed before the request was done")
        if self._thread.is_alive():
            self.call_soon(lambda: self._shut(error))  # answered or not: somebody else may have closed it by then
            self._thread.join()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _loop(self) -> None:
        while not self._closed:
            while not self._closed and not (self._engine.busy and self._calls.empty()):
                action, answer = self._calls.get()
                try:
                    answer.set_result(action())
                except Exception as error:  # whatever one client asked for, the others' thread goes on
                    answer.set_exception(error)
            if not self._closed:
                self._step()

    def _step(self) -> None:
        try:
            produced = self._engine.step()
        except Exception as error:  # out of memory, a failing kernel: those who were open learn it, the next may run
            self._end_all(self._failed(error))
            return
        self._end_failed()
        now, remaining = time.monotonic(), Counter(request.number for request, _ in produced)  # many, of a draft
        for request, token in produced:
            stage = 0 if request.version is None else request.version.stage
            behind, draft = remaining[request.number], request.drafting
            token_logprob = request.token_logprobs[-behind] if request.token_logprobs and not draft else None
            remaining[request.number] -= 1
            stream = self._streams[request.number]
            if stream.begun_s is None:  # numpy has begun with some
                stream.begun_s = request.begun_s
            stream.put(TokenEvent(token, stage, now, token_logprob, draft))
            if request.finished and behind == 1:
                self._streams.pop(request.number).end()

    def _accept(self, stream: Stream, submission: Submission) -> None:
        prompt, sampling, moves, variant, source = submission
        if variant and variant not in self.versions:
            raise BusyError(f"{variant} answers once the whole model is here; ask again later")
        # chances of a prompt are of tokens that are computed
        # what began before there was an engine has keys and values of its first version; a better one may have come
        begun = None if source is None else self._first
        asks = source is None and self.sources is not None and not sampling.prompt_logprobs
        source = self.sources(prompt, variant) if asks else source
        version = self.versions[variant] if variant else begun
        if version is None and source is None and sampling.verify is not None and not sampling.drafts:
            version, moves = self._final, moves and self._final is None
        stream.request = self._engine.submit(prompt, sampling, moves=moves, source=source, version=version)
        self._streams[stream.request.number] = stream

    def _drop(self, stream: Stream) -> None:
        if stream.request is not None and self._streams.pop(stream.request.number, None) is not None:
            self._engine.cancel(stream.request)
            stream.end()
            self._end_failed()

    def _end_failed(self) -> None:
        for request in self._engine.failed():
            self._streams.pop(request.number).end(request.failure)

    def _shut(self, error: Exception) -> None:
        self._closed = True
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            self._engine.cancel(stream.request)
            stream.end(error)
        self._streams.clear()
        self._engine.failed()  # they were among them
