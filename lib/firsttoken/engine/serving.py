"""The engine in a thread of its own: clients submit from anywhere and read their tokens as they come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from firsttoken.engine.engine import Engine
from firsttoken.engine.request import GREEDY, Request, Sampling
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError

_END = object()


class Stream:
    """The tokens of one request, in order; iterating waits for the next.

    A client that goes away closes the stream (or leaves its ``with`` block): the request ends and its blocks are free.
    """

    def __init__(self, request: Request, close: Callable[[Request], None]) -> None:
        self.request = request
        self._close = close
        self._events: queue.SimpleQueue = queue.SimpleQueue()

    def __iter__(self) -> Iterator[int]:
        """Raises RequestError when the server was closed or failed before the request was done."""
        while (event := self._events.get()) is not _END:
            if isinstance(event, FirstTokenError):
                self._events.put(event)
                raise event
            yield event
        self._events.put(_END)  # who asks again does not wait for ever

    def close(self) -> None:
        """End the request now; does nothing when it is over."""
        if not self.request.finished:
            self._close(self.request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def put(self, event: object) -> None:
        """A token, an error, or the end."""
        self._events.put(event)


class Server:
    """Steps ``engine`` as long as requests are open. At most ``most`` are; use it as a context manager.

    Only its thread touches the engine. What clients want is done between two steps, so a submission waits for one.
    """

    def __init__(self, engine: Engine, most: int = 256) -> None:
        self._engine = engine
        self._most = most
        self._streams: dict[int, Stream] = {}
        self._wishes: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="firsttoken-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Stream:
        """Begin a request. Raises RequestError for one that can never run, BusyError when too many are open."""
        return self._wish(lambda: self._submit(prompt, sampling))

    def close(self) -> None:
        """End every open request with an error, and the thread."""
        if self._thread.is_alive():
            self._wishes.put((self._shut, Future()))  # answered or not: somebody else may have closed it by then
            self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _wish(self, what: Callable[[], Any]) -> Any:
        """What ``what`` returns or raises when the engine's thread has called it."""
        answer: Future = Future()
        self._wishes.put((what, answer))
        while True:
            try:
                return answer.result(timeout=1)
            except TimeoutError:
                if not self._thread.is_alive():
                    raise RequestError("the server is closed; start another") from None

    def _loop(self) -> None:
        while not self._closed:
            while not self._closed and not (self._engine.busy and self._wishes.empty()):
                what, answer = self._wishes.get()
                try:
                    answer.set_result(what())
                except Exception as error:  # whatever one client asked for, the others' thread goes on
                    answer.set_exception(error)
            if not self._closed:
                self._step()

    def _step(self) -> None:
        try:
            produced = self._engine.step()
        except Exception as error:  # out of memory, a failing kernel: those who were open learn it, the next may run
            self._end_all(RequestError(f"the engine failed: {error}"))
            return
        for request, token in produced:
            self._streams[request.number].put(token)
            if request.finished:
                self._streams.pop(request.number).put(_END)

    def _submit(self, prompt: Sequence[int], sampling: Sampling) -> Stream:
        if len(self._streams) >= self._most:
            raise BusyError(f"{self._most} requests are open; ask again later")
        request = self._engine.submit(prompt, sampling)
        stream = self._streams[request.number] = Stream(
            request, lambda request: self._wish(lambda: self._drop(request))
        )
        return stream

    def _drop(self, request: Request) -> None:
        if (stream := self._streams.pop(request.number, None)) is not None:
            self._engine.cancel(request)
            stream.put(_END)

    def _shut(self) -> None:
        self._closed = True
        self._end_all(RequestError("the server was closed before the request was done"))

    def _end_all(self, error: FirstTokenError) -> None:
        for stream in self._streams.values():
            self._engine.cancel(stream.request)
            stream.put(error)
        self._streams.clear()
