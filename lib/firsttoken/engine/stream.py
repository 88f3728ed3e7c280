"""The tokens of a request on their way from what computes them to whoever asked for them."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from firsttoken.engine.request import Sampling
from firsttoken.study.errors import EngineError, FirstTokenError, RequestError, first_line

if TYPE_CHECKING:
    from firsttoken.engine.request import Request, TokenLogprob
    from firsttoken.engine.scheduler_state import KVSource

Submission = tuple[Sequence[int], Sampling, bool, str, "KVSource | None"]  # as AsyncEngine.add has them


class TokenSink(Protocol):
    """Receives the tokens of a stream one after the other, and then None, or the error that ended the stream."""

    def put(self, item: TokenEvent | Exception | None) -> None:
        """Take one item. The engine's thread calls this."""


@dataclass(frozen=True)
class TokenEvent:
    """A generated token, the stage that computed it (0 if the model has no stages), when it came (``time.monotonic``
    seconds), and its likelihood if that was asked for. A ``draft`` is not part of the answer: the whole model's tokens
    come behind all of them, from the answer's first on."""

    token_id: int
    stage: int
    at_s: float
    token_logprob: TokenLogprob | None = None
    draft: bool = False


class Stream(AbstractContextManager["Stream"]):
    """The tokens of one request, in order; iterating waits for the next. ``request`` is None until an engine has it.

    A client that goes away closes the stream (or leaves its ``with`` block): the request ends and its blocks are free.
    ``leave`` is called for it, and ``ended`` before the client can know that there is no more. What goes to another
    ``inbox`` cannot be read here.
    """

    def __init__(
        self,
        leave: Callable[[Stream, bool], None],
        ended: Callable[[Stream], None] | None = None,
        inbox: TokenSink | None = None,
    ) -> None:
        self.request: Request | None = None
        self.begun_s: float | None = None  # when it was first computed (``time.monotonic`` seconds)
        self._leave = leave
        self._ended = ended
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._inbox = inbox or self._events

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens' ids; raises as ``events``."""
        for event in self.events():
            yield event.token_id

    def events(self) -> Iterator[TokenEvent]:
        """The tokens as they come. Raises what ended the request before it was done: a RequestError when the server was
        closed or could not take it."""
        while (event := self._events.get()) is not None:
            if isinstance(event, Exception):
                self._events.put(event)
                raise event
            yield event
        self._events.put(None)  # who asks again does not wait for ever

    def close(self) -> None:
        """End the request, and wait until it has ended; does nothing when it is over."""
        self._leave(self, True)

    def cancel(self) -> None:
        """End the request before the engine's next step, without waiting for it."""
        self._leave(self, False)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def put(self, event: TokenEvent) -> None:
        """Hand a token to the client."""
        self._inbox.put(event)

    def end(self, error: Exception | None = None) -> None:
        """Tell the client that no more tokens come."""
        if self._ended is not None:
            self._ended(self)
        self._inbox.put(error)


def step_failure(error: Exception) -> FirstTokenError:
    """Return what clients of a step that raised ``error`` are told: the error if it was foreseen, else an EngineError,
    also for a RequestError, which belongs to ``submit``. The traceback goes to the log."""
    if isinstance(error, FirstTokenError) and not isinstance(error, RequestError):
        return error
    logging.getLogger(__name__).error("a step failed", exc_info=error)
    return EngineError(f"the engine failed: {first_line(error)}; ask again, and if it stays, look at the server's log")
