"""A name for each request, by which a client's log and a server's can be brought together."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_SANE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class RequestIds:
    """Gives every response of ``app`` the header x-request-id.

    It is the client's own, where it sent one of 128 letters, digits and marks at most, or else a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
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
