"""The HTTP side of a replica: OpenAI's interface, and what there is to see of the model, the engine and the stages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from firsttoken.progressiveserve.recovery.server import GrowingServer
from firsttoken.service import replies
from firsttoken.service.answer import Answers
from firsttoken.service.config import ServiceConfig
from firsttoken.service.doors import Counting, Doors
from firsttoken.service.guard import Guard
from firsttoken.service.inbox import ClientGone, Inbox, LoopBridge
from firsttoken.service.metrics import Metrics
from firsttoken.service.model import serve_model
from firsttoken.service.named import RequestIds
from firsttoken.service.refusals import refusal, refuse, refusing
from firsttoken.service.responses import Streamed, leaving, whole
from firsttoken.service.schema import ChatRequest, CompletionRequest, ServedRequest, parse_request
from firsttoken.service.text import Vocabulary, read_vocabulary
from firsttoken.service.unread import MOST_BODY_BYTES, Unread
from firsttoken.study.errors import FirstTokenError, RequestError

_PAGE = Path(__file__).with_name("page.html")
_ONLY_OURS = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


class Replica:
    """The requests that one server answers. ``name`` tells replicas apart."""

    def __init__(self, server: GrowingServer, vocabulary: Vocabulary, config: ServiceConfig, name: str) -> None:
        self._server, self._vocabulary, self._config, self._name = server, vocabulary, config, name
        self._model = config.model
        self._created = int(time.time())
        self._metrics = Metrics(server.standing, lambda: server.status()["stage"])
        self._bridge: LoopBridge
        self.doors, self.unread = Doors(), Unread()

    def begin(self) -> None:
        """The event loop runs."""
        self._bridge = LoopBridge()

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answered(request, CompletionRequest, replies.Completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answered(request, ChatRequest, replies.Chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when a prompt is answered now, 503 while it would wait for stage 1 or the service ends."""
        status = self._server.status()
        if self.doors.closed:
            status |= {"state": "closing", "stage": 0}
        body = {key: status[key] for key in ("state", "stage", "error")}
        return JSONResponse(body, 200 if status["stage"] else 503)

    async def stage(self, request: Request) -> Response:
        """GET /stage: the state of the replica that answers, which is named, and what its engine holds."""
        engine = vars(self._server.standing())
        return JSONResponse(self._server.status() | {"replica": self._name, "engine": engine})

    async def swarm(self, request: Request) -> Response:
        """GET /swarm: who holds which blocks. Raises HTTPException where the blocks are here."""
        if not self._config.swarm:
            raise HTTPException(404, "the blocks are here; `firsttoken serve --swarm HOST:PORT` serves a swarm's")
        return JSONResponse(self._server.overview())

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self._metrics.page(), media_type=self._metrics.content_type)

    async def page(self, request: Request) -> Response:
        """GET /: a page to watch the stages by."""
        text = _PAGE.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _ONLY_OURS})

    async def _answered(self, request: Request, kind: type[ServedRequest], reply: type[replies.Reply]) -> Response:
        inbox, headers = Inbox(self._bridge), {"X-Replica": self._name}
        answer = None
        try:
            asked = parse_request(kind, await self._body(request))
            self._check_model(asked.model)
            self.doors.check()
            if asked.n > self._config.max_choices:
                raise RequestError(f"n: {asked.n} answers, and the limit is {self._config.max_choices}")
            answer = Answers(self._server, self._vocabulary, asked, inbox, self._metrics)
            await asyncio.to_thread(answer.begin)
            said = reply.new(self._model)
            with leaving(request, inbox):
                if asked.stream:
                    pieces = answer.batches()
                    first = await anext(pieces)
                    return Streamed(request, inbox, answer, (first, pieces), said, self._metrics, headers)
                response = await whole(answer, said, headers)
            self._close(answer, "answered")
            return response
        except (ClientGone, ClientDisconnect):
            self._close(answer, "cancelled")
            return Response(status_code=499)  # which nobody reads
        except asyncio.CancelledError:  # how Ray ends what a client has left
            self._close(answer, "cancelled")
            raise
        except Exception as error:
            self._close(answer, "refused" if refusal(error)[0] < 500 else "failed")
            return refusing(error)

    def _close(self, answer: Answers | None, outcome: str) -> None:
        if answer is not None:
            answer.close()
        self._metrics.requests.labels(outcome).inc()

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_s):
                async for chunk in request.stream():
                    self.unread.take(len(chunk))
                    body += chunk
                    if len(body) > MOST_BODY_BYTES:
                        raise HTTPException(413, f"the body is larger than {MOST_BODY_BYTES:,} bytes, the limit")
            return bytes(body)
        except TimeoutError:
            raise HTTPException(408, f"the body did not end within {self._config.body_s:g} s") from None
        finally:
            self.unread.give_back(len(body))

    def _described(self) -> replies.Json:
        longest = min(self._server.config.longest, self._vocabulary.context)
        return replies.one_model(self._model, self._created, longest)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._model):
            raise HTTPException(404, f"model: {model!r} is not served here; {self._model!r} is")


def build_app(replica: Replica, server: GrowingServer, config: ServiceConfig) -> Starlette:
    """The application of one replica; when it shuts down, it closes ``server``."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        replica.begin()
        yield
        await asyncio.to_thread(server.close)

    app = Starlette(
        routes=[
            Route("/v1/completions", replica.completions, methods=["POST"]),
            Route("/v1/chat/completions", replica.chat, methods=["POST"]),
            Route("/v1/models", replica.models),
            Route("/v1/models/{name:path}", replica.model),
            Route("/health", replica.health),
            Route("/stage", replica.stage),
            Route("/swarm", replica.swarm),
            Route("/metrics", replica.metrics),
            Route("/", replica.page),
        ],
        exception_handlers=dict.fromkeys((FirstTokenError, HTTPException, Exception), refuse),
        middleware=[
            Middleware(RequestIds),
            Middleware(Guard, key=config.api_key, loopback=config.loopback),
            Middleware(Counting, doors=replica.doors),
        ],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would repeat whatever Host was sent
    app.state.begin = server.start  # to load: not before whoever listens has imported what it needs
    app.state.doors, app.state.unread = replica.doors, replica.unread
    app.state.close = server.close  # for who ends the process, before connections are waited for
    return app


def build_replica(
    config: ServiceConfig, name: str, broken: Callable[[FirstTokenError], None] = lambda error: None
) -> Starlette:
    """The replica ``name`` of the service, whose model begins to load when ``state.begin`` is called. ``broken`` is
    told of what leaves it no hope."""
    vocabulary = read_vocabulary(config.folder, config.max_prompt_tokens)
    server = serve_model(config, broken, vocabulary.context)
    return build_app(Replica(server, vocabulary, config, name), server, config)
