"""Who is let in: the key, and no page of another origin (a browser sends what that page says to loopback too)."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from firsttoken.service.refusals import refusing
from firsttoken.service.unread import MOST_HEAD_BYTES, head_bytes


class Guard:
    """Refuses before ``app`` reads anything.

    With a ``key`` everything below /v1/ asks for it. With ``loopback`` the Host must be an address or localhost: a
    foreign name that resolves to this machine (DNS rebinding) would make its page ours. A POST from a page of another
    origin is refused whatever its content type, as text/plain needs no leave of ours.
    """

    def __init__(self, app: ASGIApp, key: str | None, loopback: bool) -> None:
        self._app, self._key, self._loopback = app, key, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        if scope["type"] == "http" and head_bytes(scope) > MOST_HEAD_BYTES:
            told = f"the head of the request is longer than {MOST_HEAD_BYTES:,} bytes; send less in it"
            await refusing(HTTPException(431, told))(scope, receive, send)
            return
        if scope["type"] == "http" and (error := self._odd(scope["method"], scope["path"], Headers(scope=scope))):
            await refusing(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _odd(self, method: str, path: str, headers: Headers) -> HTTPException | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and not _is_local(host):
            return HTTPException(403, "this service is for its own machine; ask for 127.0.0.1 or localhost")
        if method not in ("GET", "HEAD") and origin is not None and urlsplit(origin).netloc != host:
            return HTTPException(403, "pages of another origin are not answered")
        if self._key is not None and path.startswith("/v1/") and not self._is_key(headers.get("authorization", "")):
            told = {"WWW-Authenticate": "Bearer"}
            return HTTPException(401, "the API key is missing or wrong; send Authorization: Bearer KEY", headers=told)
        return None

    def _is_key(self, given: str) -> bool:
        scheme, _, key = given.partition(" ")
        return hmac.compare_digest(key.strip().encode(), self._key.encode()) and scheme.lower() == "bearer"


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
