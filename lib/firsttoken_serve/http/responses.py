"""An answer over HTTP: whole, or as server-sent events while it comes; either ends when its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from firsttoken_serve.http.answer import Answers
from firsttoken_serve.http.choice import TextDelta
from firsttoken_serve.http.error_responses import error_body
from firsttoken_serve.http.logprobs_format import AnswerToken
from firsttoken_serve.http.prometheus_metrics import ModelMetrics
from firsttoken_serve.http.response_bodies import DONE, Reply, event, usage
from firsttoken_serve.http.token_queue import ClientGone, Inbox


@contextmanager
def watching_client(request: Request, inbox: Inbox) -> Iterator[None]:
    """Inside the block ``inbox`` is told when the client of ``request``, whose body has been read, goes."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        inbox.disconnect()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def whole_answer(answer: Answers, reply: Reply, headers: dict[str, str]) -> JSONResponse:
    """All choices at once. Raises what ended one of them, and ClientGone."""
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str | None] = {}
    logs: dict[int, list[AnswerToken]] = {}
    stage = 0
    async for deltas in answer.batches():
        for delta in deltas:
            texts.setdefault(delta.choice, []).append(delta.text)
            reasons[delta.choice] = delta.finish_reason
            stage = max(stage, delta.stage)
            if answer.request.top_count is not None:
                logs.setdefault(delta.choice, []).extend(delta.logprobs or ())
    choices = [reply.answer(n, "".join(texts[n]), reasons[n], logs.get(n)) for n in sorted(texts)]
    body = reply.body(reply.whole, choices, stage)
    return JSONResponse(body | {"usage": usage(answer.prompt_tokens, answer.completion_tokens)}, headers=headers)


class StreamedAnswer(Response):
    """The pieces of ``answer`` as events; ``first`` are those that have come, as a refusal has a status of its own.

    An error in mid-stream is an event too, as the status is long gone.
    """

    def __init__(
        self,
        request: Request,
        inbox: Inbox,
        answer: Answers,
        deltas: tuple[list[TextDelta], AsyncIterator[list[TextDelta]]],
        reply: Reply,
        metrics: ModelMetrics,
        headers: dict[str, str],
    ) -> None:
        stream_headers = headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=stream_headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._request, self._inbox, self._answer, self._reply, self._metrics = request, inbox, answer, reply, metrics
        self._first, self._deltas = deltas
        self._usage = answer.request.stream_options.include_usage
        self._opened: set[int] = set()
        self._stage = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI calls this to send the stream of events."""
        outcome = "answered"
        try:
            with watching_client(self._request, self._inbox):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send(send, self._events(self._first))
                async for deltas in self._deltas:
                    await self._send(send, self._events(deltas))
                await self._send(send, self._end())
        except ClientGone:
            outcome = "cancelled"
            return
        except Exception as error:
            outcome = "failed"
            await self._send(send, event(error_body(error)[1]))
        finally:
            self._answer.close()
            self._metrics.requests[outcome].inc()
        await send({"type": "http.response.body", "body": DONE})

    @staticmethod
    async def _send(send: Send, body: bytes) -> None:
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _events(self, deltas: list[TextDelta]) -> bytes:
        events = []
        for delta in deltas:
            self._stage = delta.stage
            if delta.choice not in self._opened:
                self._opened.add(delta.choice)
                if opening := self._reply.role_delta(delta.choice):
                    events.append(self._event(opening, delta.stage))
            choice = self._reply.delta(delta.choice, delta.text, delta.finish_reason, delta.logprobs)
            if delta.draft or delta.retract:
                choice["provisional"] = {"retract": delta.retract} if delta.retract else {"text": delta.draft}
            events.append(self._event(choice, delta.stage))
        return b"".join(events)

    def _event(self, choice: dict, stage: int) -> bytes:
        body = self._reply.body(self._reply.chunk, [choice], stage)
        if self._answer.request.stream_options.continuous_usage_stats:
            body["usage"] = usage(self._answer.prompt_tokens, self._answer.completion_tokens)
        elif self._usage:
            body["usage"] = None
        return event(body)

    def _end(self) -> bytes:
        if not self._usage:
            return b""
        numbers = {"usage": usage(self._answer.prompt_tokens, self._answer.completion_tokens)}
        return event(self._reply.body(self._reply.chunk, [], self._stage) | numbers)
