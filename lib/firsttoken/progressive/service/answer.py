"""One answer: the engine's tokens, which block, as pieces of text, which do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from firsttoken.progressive.service.schema import CompletionRequest
from firsttoken.progressive.service.text import StopFilter, TextStream, Vocabulary

if TYPE_CHECKING:
    from firsttoken.engine.serving import TokenEvent
    from firsttoken.progressive.recovery.server import GrowingServer


@dataclass(frozen=True)
class Piece:
    """What one token adds: ``text``, perhaps "", and the ``stage`` that computed it; ``tokens`` counts from 1.

    The last piece stands for no token: it brings the text that was held back, and ``finish_reason``.
    """

    text: str
    stage: int
    tokens: int
    finish_reason: Literal["stop", "length"] | None = None


async def answer(
    server: GrowingServer, vocabulary: Vocabulary, prompt_ids: list[int], asked: CompletionRequest
) -> AsyncGenerator[Piece, None]:
    """The pieces of an answer as they come. Closing the generator cancels the session.

    Raises, with the first piece, what :meth:`GrowingServer.submit` raises, and at any time what generation meets.
    """
    inbox = _Inbox()
    session = server.submit(prompt_ids, asked.max_tokens, asked.upgrade, vocabulary.stop_ids, events=inbox)
    text, stops = TextStream(vocabulary.tokenizer, prompt_ids), StopFilter(asked.stop)
    tokens, stage, ended = 0, 0, False
    try:
        while (event := await inbox.get()) is not None:
            tokens, stage, ended = tokens + 1, event.stage, event.token_id in vocabulary.stop_ids
            if ended:
                break
            yield Piece(stops.push(text.push(event.token_id)), stage, tokens)
            if stops.stopped:
                break
    finally:
        session.cancel()
    rest = stops.push(text.finish()) + stops.finish()
    yield Piece(rest, stage, tokens, "stop" if ended or stops.stopped else "length")


class _Inbox:
    """What a stream's tokens go into on the engine's thread, and come out of on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue()

    def put(self, item: TokenEvent | Exception | None) -> None:
        """Hand over a token, an error, or the end."""
        with suppress(RuntimeError):  # the loop is closed: the replica ends, and nobody waits
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> TokenEvent | None:
        """The next token; None at the end. Raises the error that ended the answer."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item
