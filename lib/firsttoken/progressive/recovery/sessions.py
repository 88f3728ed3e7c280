"""A request that the engine answers, as its client sees it: a stream of tokens that ends, or an error."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firsttoken.progressive.recovery.contexts import Context


@dataclass(frozen=True)
class TokenEvent:
    """One generated token, the stage that computed it, and when (``time.monotonic`` seconds)."""

    token_id: int
    stage: int
    at_s: float


class Session:
    """One greedy generation. Made by :meth:`Engine.submit`; the engine's thread writes, any other reads."""

    def __init__(
        self, prompt_ids: Sequence[int], max_new_tokens: int, upgrade: bool = False, stop_ids: Sequence[int] = ()
    ) -> None:
        self.prompt_ids, self.max_new_tokens = list(prompt_ids), max_new_tokens
        self.upgrade, self.stop_ids = upgrade, frozenset(stop_ids)
        self.submitted_s = time.monotonic()
        self.context: Context | None = None
        self.next_ids = list(prompt_ids)  # what the next step feeds: the prompt, then one token at a time
        self.emitted = 0
        self.cancelled = False
        self._queue: queue.SimpleQueue[TokenEvent | Exception | None] = queue.SimpleQueue()

    def events(self) -> Iterator[TokenEvent]:
        """The tokens as they come. Raises what the engine met if the generation failed."""
        while (event := self._queue.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        """The client is gone: the engine drops the session before its next step."""
        self.cancelled = True

    def emit(self, token_id: int, stage: int) -> bool:
        """Hand a token to the client; False when it was the last one."""
        self._queue.put(TokenEvent(token_id, stage, time.monotonic()))
        self.emitted += 1
        self.next_ids = [token_id]
        return self.emitted < self.max_new_tokens and token_id not in self.stop_ids

    def end(self, error: Exception | None = None) -> None:
        """No more tokens."""
        self._queue.put(error)
