"""The HTTP side of a replica: OpenAI's interface, and what there is to see of the model, the engine and the stages."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firsttoken import __version__
from firsttoken.engine.model_server import ModelServer
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study.errors import ClosedError, FirstTokenError, RequestError
from firsttoken_serve.chat.text import Vocabulary, read_vocabulary
from firsttoken_serve.http import response_bodies
from firsttoken_serve.http.answer import Answers, detokenized, tokenized
from firsttoken_serve.http.error_responses import error_body, error_response, handle_error
from firsttoken_serve.http.prometheus_metrics import Metrics
from firsttoken_serve.http.request_schema import ChatRequest, CompletionRequest, ServedRequest, parse_request
from firsttoken_serve.http.responses import StreamedAnswer, watching_client, whole_answer
from firsttoken_serve.http.token_queue import ClientGone, Inbox, LoopBridge
from firsttoken_serve.http.unread import MOST_BODY_BYTES, MOST_HEAD_BYTES, Unread, head_bytes
from firsttoken_serve.served_model import EarlyStart, is_staged, serve_model
from firsttoken_serve.service_config import ServiceConfig

# Who is inside: requests are counted, and none is taken once the service ends.

_POLL_S = 0.05
_GUARDED = ("/v1/", "/tokenize", "/detokenize")


class ShutdownGate:
    """Open until :meth:`close`; ``inside`` counts the requests of ``_GUARDED`` that are read, computed or answered."""

    def __init__(self) -> None:
        self.inside, self.closed = 0, False

    def close(self) -> None:
        """Take no more. It may be called by any thread."""
        self.closed = True

    def check(self) -> None:
        """Raise ClosedError once the gate is closed."""
        if self.closed:
            raise ClosedError("the service is shutting down and takes nothing new; ask it again when it is back")

    def wait(self, grace_s: float) -> None:
        """Wait until nobody is inside, at most ``grace_s`` seconds; a thread that has nothing else to do calls this.

        A client that has connected and sent may not have been read yet, and is told that the service ends: this waits
        for such clients.
        """
        time.sleep(2 * _POLL_S)
        until = time.monotonic() + grace_s
        while self.inside and time.monotonic() < until:
            time.sleep(_POLL_S)


class InFlightMiddleware:
    """Lets requests through ``gate`` to ``app``."""

    def __init__(self, app: ASGIApp, gate: ShutdownGate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI calls this for each connection; a request of ``_GUARDED`` is counted, or refused once all is closed."""
        if scope["type"] != "http" or not scope["path"].startswith(_GUARDED):
            await self._app(scope, receive, send)
            return
        try:
            self._gate.check()
        except ClosedError as error:
            await error_response(error)(scope, receive, send)
            return
        self._gate.inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.inside -= 1


# Who is let in: the key, and no page of another origin (a browser sends what that page says to loopback too).


class AuthMiddleware:
    """Refuses before ``app`` reads anything.

    With a ``key`` everything of ``_GUARDED`` asks for it. With ``loopback`` the Host must be an address or localhost: a
    foreign name that resolves to this machine (DNS rebinding) would make its page ours. HTTP/1.0 has none, and no
    browser speaks that. A POST from a page of another origin is refused whatever its content type, as text/plain needs
    no leave of ours.

    Behind a proxy, such as JupyterHub's, the browser knows the service by another name than the Host says, or the Host
    is that name. Then it is the browser itself that says whether page and request are of one origin: no script can set
    Sec-Fetch-Site. A browser sends that to https and to this machine alone, which a rebound name is neither of: a
    foreign Host is taken with it, and where there is an Origin, with one of https.
    """

    def __init__(self, app: ASGIApp, key: str | None, loopback: bool) -> None:
        self._app, self._key, self._loopback = app, key, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI calls this for every connection; a request that is not let in is refused before ``app`` sees it."""
        if scope["type"] == "http" and head_bytes(scope) > MOST_HEAD_BYTES:
            refusal = f"the head of the request is longer than {MOST_HEAD_BYTES:,} bytes; send less in it"
            await error_response(HTTPException(431, refusal))(scope, receive, send)
            return
        if scope["type"] == "http" and (error := self._refusal(scope, Headers(scope=scope))):
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> HTTPException | None:
        path, host, origin = scope["path"], headers.get("host"), headers.get("origin")
        site = headers.get("sec-fetch-site")
        hostless = host is None and scope["http_version"] == "1.0"
        if self._loopback and not (hostless or _is_local(host or "") or _is_by_https(site, origin)):
            return HTTPException(403, "this service is for its own machine; ask for 127.0.0.1 or localhost")
        foreign = origin is not None and site != "same-origin" and urlsplit(origin).netloc != host
        if foreign and scope["method"] not in ("GET", "HEAD"):
            return HTTPException(403, "pages of another origin are not answered")
        if self._key is not None and path.startswith(_GUARDED) and not self._is_key(headers.get("authorization", "")):
            extra_headers = {"WWW-Authenticate": "Bearer"}
            return HTTPException(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", headers=extra_headers
            )
        return None

    def _is_key(self, given: str) -> bool:
        scheme, _, key = given.partition(" ")
        return hmac.compare_digest(key.strip().encode(), self._key.encode()) and scheme.lower() == "bearer"


def _is_by_https(site: str | None, origin: str | None) -> bool:
    """Return whether a browser says that its user, or a page of the same origin, asks, and asks by https."""
    return site in ("same-origin", "none") and (origin is None or urlsplit(origin).scheme == "https")


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


# A name for each request, by which a client's log and a server's can be brought together.

HEADER = b"x-request-id"
_SANE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class RequestIdMiddleware:
    """Gives every response of ``app`` the header x-request-id.

    It is the client's own, where it sent one of 128 letters, digits and marks at most, or else a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI calls this for every connection; the response to a request gets its id as a header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _SANE.fullmatch(given) else uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), (HEADER, name.encode())]}
            await send(message)

        await self._app(scope, receive, named)


_PAGE = Path(__file__).with_name("page.html")
_ONLY_OURS = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


class Replica:
    """The requests that one server answers. ``name`` tells replicas apart."""

    def __init__(self, server: ModelServer, vocabulary: Vocabulary, config: ServiceConfig, name: str) -> None:
        self._server, self._vocabulary, self._config, self._name = server, vocabulary, config, name
        self._variants = {config.model: ""} | {name: name for name, _ in config.variants}
        self._created, loads = int(time.time()), is_staged(config.folder) and not config.swarm
        self._stage_bytes = [stage.bytes for stage in read_manifest(config.folder).stages] if loads else []
        self._max_model_len = min(server.limits.longest, vocabulary.context)
        self._metrics = Metrics(server.stats, lambda: server.status()["stage"], self._variants)
        self._bridge: LoopBridge
        self.gate, self.unread = ShutdownGate(), Unread()

    def begin(self) -> None:
        """Note that the event loop runs, over which tokens reach the requests."""
        self._bridge = LoopBridge()

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions, whole or as a stream."""
        return await self._answered(request, CompletionRequest, response_bodies.Completion)

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions, whole or as a stream."""
        return await self._answered(request, ChatRequest, response_bodies.Chat)

    async def tokenize(self, request: Request) -> Response:
        """Answer POST /tokenize."""
        parsed, ids = await asyncio.to_thread(tokenized, self._vocabulary, await self._body(request))
        self._named(parsed.model)
        return JSONResponse({"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """Answer POST /detokenize."""
        parsed, text = await asyncio.to_thread(detokenized, self._vocabulary, await self._body(request))
        self._named(parsed.model)
        return JSONResponse({"prompt": text})

    async def version(self, request: Request) -> Response:
        """Answer GET /version."""
        return JSONResponse({"version": __version__})

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models with the model and its variants."""
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._variants]})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/NAME. Raises HTTPException for a model that is not served."""
        return JSONResponse(self._described(self._named(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when a prompt is answered now, 503 while it would wait for stage 1 or the service ends."""
        status = self._server.status()
        if self.gate.closed:
            status |= {"state": "closing", "stage": 0}
        return JSONResponse({key: status[key] for key in ("state", "stage", "error")}, 200 if status["stage"] else 503)

    async def stage(self, request: Request) -> Response:
        """GET /stage: the state of the replica that answers, which is named, and what its engine holds."""
        engine = vars(self._server.stats())
        model = {"stage_bytes": self._stage_bytes, "chat": self._vocabulary.template.chats}
        return JSONResponse(self._server.status() | model | {"replica": self._name, "engine": engine})

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics, for Prometheus."""
        return Response(self._metrics.page(), media_type=self._metrics.content_type)

    async def page(self, request: Request) -> Response:
        """GET /: a page to watch the stages by."""
        text = _PAGE.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _ONLY_OURS})

    async def _answered(
        self, request: Request, kind: type[ServedRequest], reply: type[response_bodies.Reply]
    ) -> Response:
        inbox, headers = Inbox(self._bridge), {"X-Replica": self._name}
        answer, metrics = None, self._metrics.of[self._named(None)]
        try:
            parsed = parse_request(kind, await self._body(request))
            model = self._named(parsed.model)
            metrics = self._metrics.of[model]
            # The gate was open when the request arrived, and may have been closed while its body was read.
            self.gate.check()
            if parsed.n > self._config.max_choices:
                raise RequestError(f"n: {parsed.n} answers, and the limit is {self._config.max_choices}")
            answer = Answers(self._server, self._vocabulary, parsed, inbox, metrics, self._variants[model])
            await asyncio.to_thread(answer.begin)
            body = reply.new(model)
            with watching_client(request, inbox):
                if parsed.stream:
                    deltas = answer.batches()
                    first = await anext(deltas)
                    return StreamedAnswer(request, inbox, answer, (first, deltas), body, metrics, headers)
                response = await whole_answer(answer, body, headers)
            _close(answer, metrics.requests["answered"])
            return response
        except (ClientGone, ClientDisconnect):
            _close(answer, metrics.requests["cancelled"])
            return Response(status_code=499)  # which nobody reads
        except asyncio.CancelledError:  # how Ray ends what a client has left
            _close(answer, metrics.requests["cancelled"])
            raise
        except Exception as error:
            _close(answer, metrics.requests["refused" if error_body(error)[0] < 500 else "failed"])
            return error_response(error)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_s):
                async for chunk in request.stream():
                    self.unread.hold(len(chunk))
                    body += chunk
                    if len(body) > MOST_BODY_BYTES:
                        raise HTTPException(413, f"the body is larger than {MOST_BODY_BYTES:,} bytes, the limit")
            return bytes(body)
        except TimeoutError:
            raise HTTPException(408, f"the body did not end within {self._config.body_s:g} s") from None
        finally:
            self.unread.release(len(body))

    def _described(self, model: str) -> response_bodies.Json:
        card = {"id": model, "object": "model", "created": self._created, "owned_by": "firsttoken"}
        return card | {"max_model_len": self._max_model_len}

    def _named(self, model: str | None) -> str:
        """The model of this name; without one, that of the folder. Raises HTTPException for one that is not served."""
        first, *others = self._variants
        if model is not None and model not in self._variants:
            served = " and ".join([repr(first), *(repr(name) for name in others)])
            raise HTTPException(404, f"model: {model!r} is not served here; {served} {'are' if others else 'is'}")
        return first if model is None else model


def _close(answer: Answers | None, ended: Counter) -> None:
    if answer is not None:
        answer.close()
    ended.inc()


def build_app(replica: Replica, server: ModelServer, config: ServiceConfig) -> Starlette:
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
            Route("/tokenize", replica.tokenize, methods=["POST"]),
            Route("/detokenize", replica.detokenize, methods=["POST"]),
            Route("/version", replica.version),
            Route("/ping", replica.health, methods=["GET", "POST"]),
            Route("/health", replica.health),
            Route("/stage", replica.stage),
            Route("/metrics", replica.metrics),
            Route("/", replica.page),
        ],
        exception_handlers=dict.fromkeys((FirstTokenError, HTTPException, Exception), handle_error),
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(AuthMiddleware, key=config.api_key, loopback=config.loopback),
            Middleware(InFlightMiddleware, gate=replica.gate),
        ],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would repeat whatever Host was sent
    app.state.begin = server.start  # to load: not before whoever listens has imported what it needs
    app.state.gate, app.state.unread = replica.gate, replica.unread
    app.state.close = server.close  # for who ends the process, before connections are waited for
    return app


def build_replica(
    config: ServiceConfig,
    name: str,
    broken: Callable[[FirstTokenError], None] = lambda error: None,
    early_start: EarlyStart | None = None,
) -> Starlette:
    """The replica ``name`` of the service, whose model begins to load when ``state.begin`` is called. ``broken`` is
    told of an error that no retry mends. ``early_start`` is the model that answers until torch is imported, as
    :func:`start_before_torch` returns it."""
    vocabulary = read_vocabulary(config.folder, config.max_prompt_tokens)
    server = serve_model(config, broken, vocabulary.context, early_start)
    app = build_app(Replica(server, vocabulary, config, name), server, config)
    app.state.template = vocabulary.template
    return app
