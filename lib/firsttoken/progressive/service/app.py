"""The HTTP side of a replica: completions, models, health, stage, and a page to look at.

Only a replica imports this module: FastAPI comes with ray[serve] and is not there everywhere.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from firsttoken.link import Link, LinkConfig
from firsttoken.progressive.service import schema
from firsttoken.progressive.service.answer import Piece, answer
from firsttoken.progressive.service.config import ServiceConfig
from firsttoken.progressive.service.refusals import refusal, refuse
from firsttoken.progressive.service.text import Vocabulary, read_vocabulary
from firsttoken.study.dtypes import AUTO
from firsttoken.study.errors import FirstTokenError

if TYPE_CHECKING:
    from firsttoken.progressive.recovery.server import GrowingServer

MOST_BODY_BYTES = 1_000_000
_PAGE = Path(__file__).with_name("page.html")
_ONLY_OURS = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


class Replica:
    """The requests that one server answers. ``name`` tells replicas apart."""

    def __init__(self, server: GrowingServer, vocabulary: Vocabulary, model: str, name: str) -> None:
        self._server, self._vocabulary, self._model, self._name = server, vocabulary, model, name
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = schema.parse_request(await _body(request))
        self._check_model(asked.model)
        prompt_ids = await asyncio.to_thread(self._vocabulary.prompt_ids, asked.prompt)
        pieces = answer(self._server, self._vocabulary, prompt_ids, asked)
        replica = {"X-Replica": self._name}
        identity, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())

        def response(text: str, piece: Piece) -> schema.Json:
            return schema.completion(identity, created, self._model, text, piece.stage, piece.finish_reason)

        if not asked.stream:
            async with aclosing(pieces):
                collected = [piece async for piece in pieces]
            body = response("".join(piece.text for piece in collected), collected[-1])
            body["usage"] = schema.usage(len(prompt_ids), collected[-1].tokens)
            return JSONResponse(body, headers=replica)

        async def chunks() -> AsyncGenerator[schema.Json, None]:
            no_usage = {"usage": None} if asked.stream_options.include_usage else {}
            async with aclosing(pieces):
                piece = first
                yield response(piece.text, piece) | no_usage
                async for piece in pieces:
                    yield response(piece.text, piece) | no_usage
            if no_usage:
                numbers = {"choices": [], "usage": schema.usage(len(prompt_ids), piece.tokens)}
                yield response("", piece) | numbers

        first = await anext(pieces)  # so that a refusal, or a load that fails, still has a status of its own
        headers = replica | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_server_sent(chunks()), media_type="text/event-stream", headers=headers)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse(schema.models(self._model, self._created))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when a prompt is answered now, 503 while it would wait for stage 1."""
        status = self._server.status()
        body = {key: status[key] for key in ("state", "stage", "error")}
        return JSONResponse(body, 200 if status["stage"] else 503)

    async def stage(self, request: Request) -> Response:
        """GET /stage: the state of the replica that answers, which is named."""
        return JSONResponse(self._server.status() | {"replica": self._name})

    async def page(self, request: Request) -> Response:
        """GET /: a page to watch the stages by."""
        text = _PAGE.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _ONLY_OURS})

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._model):
            raise HTTPException(404, f"model: {model!r} is not served here; {self._model!r} is")


def build_app(replica: Replica, server: GrowingServer) -> FastAPI:
    """The application of one replica; when it shuts down, it closes ``server``."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.close)

    app = FastAPI(
        routes=[
            Route("/v1/completions", replica.completions, methods=["POST"]),
            Route("/v1/models", replica.models),
            Route("/health", replica.health),
            Route("/stage", replica.stage),
            Route("/", replica.page),
        ],
        exception_handlers=dict.fromkeys((FirstTokenError, HTTPException, Exception), refuse),
        lifespan=lifespan,
        openapi_url=None,  # its pages would come from elsewhere
    )
    app.state.close = server.close  # for who ends the process, before connections are waited for
    return app


def build_replica(config: ServiceConfig, name: str) -> FastAPI:
    """The replica ``name`` of the service. Loading begins, and goes on after the return."""
    from firsttoken.progressive.recovery.limits import GrowthConfig
    from firsttoken.progressive.recovery.server import GrowingServer

    limits = GrowthConfig(
        threads=config.threads,
        max_sessions=config.max_sessions,
        max_prompt_tokens=config.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
    )
    server = GrowingServer(config.folder, [Link(LinkConfig(config.gbit_per_s))], limits, dtype=AUTO)
    server.start()
    vocabulary = read_vocabulary(config.folder, config.max_prompt_tokens)
    return build_app(Replica(server, vocabulary, config.model, name), server)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MOST_BODY_BYTES:,} bytes, the limit")
    return bytes(body)


async def _server_sent(chunks: AsyncGenerator[schema.Json, None]) -> AsyncGenerator[str, None]:
    """Server-sent events; an error in the middle of an answer is one of them, as its status is long gone."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _event(chunk)
        except Exception as error:
            yield _event(refusal(error)[1])
    yield "data: [DONE]\n\n"


def _event(content: schema.Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
