"""One answer: the engine's tokens, which block, as pieces of text, which do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from firsttoken.progressive.service.schema import CompletionRequest
from firsttoken.progressive.service.text import StopFilter, TextStream, Vocabulary

if TYPE_CHECKING:
    from firsttoken.progressive.recovery.engine import Engine
    from firsttoken.progressive.recovery.sessions import Session, TokenEvent


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
    engine: Engine, vocabulary: Vocabulary, prompt_ids: list[int], asked: CompletionRequest
) -> AsyncGenerator[Piece, None]:
    """The pieces of an answer as they come. Closing the generator cancels the session.

    Raises, with the first piece, what :meth:`Engine.submit` raises, and at any time what generation meets.
    """
    session = engine.submit(prompt_ids, asked.max_tokens, asked.upgrade, vocabulary.stop_ids)
    text, stops = TextStream(vocabulary.tokenizer, prompt_ids), StopFilter(asked.stop)
    tokens, stage, ended = 0, 0, False
    async with aclosing(_follow(session)) as events:
        async for event in events:
            tokens, stage, ended = tokens + 1, event.stage, event.token_id in vocabulary.stop_ids
            if ended:
                break
            yield Piece(stops.push(text.push(event.token_id)), stage, tokens)
            if stops.stopped:
                break
    rest = stops.push(text.finish()) + stops.finish()
    yield Piece(rest, stage, tokens, "stop" if ended or stops.stopped else "length")


async def _follow(session: Session) -> AsyncGenerator[TokenEvent, None]:
    """The events of a session; a thread waits for them, so that the event loop need not."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue()

    def hand_over(item: TokenEvent | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the replica ends, and nobody waits
            loop.call_soon_threadsafe(inbox.put_nowait, item)

    def relay() -> None:
        try:
            for event in session.events():
                hand_over(event)
        except Exception as error:
            hand_over(error)
        else:
            hand_over(None)

    # a thread of its own: the loop's pool has few, and those that wait for slow answers would keep out all others
    threading.Thread(target=relay, name="answer", daemon=True).start()
    try:
        while (item := await inbox.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        session.cancel()
