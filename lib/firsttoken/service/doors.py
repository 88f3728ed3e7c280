"""Who is inside: requests are counted, and none is taken once the service ends."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from firsttoken.service.refusals import refusing
from firsttoken.study.errors import ClosedError

_LOOK_S = 0.05


class Doors:
    """Open until :meth:`close`; ``inside`` counts the requests below /v1/ that are read, computed or answered."""

    def __init__(self) -> None:
        self.inside, self.closed = 0, False

    def close(self) -> None:
        """Take no more. It may be called by any thread."""
        self.closed = True

    def check(self) -> None:
        """Raises ClosedError once they are closed."""
        if self.closed:
            raise ClosedError("the service is shutting down and takes nothing new; ask it again when it is back")

    def wait(self, grace_s: float) -> None:
        """Until nobody is inside, at most ``grace_s`` seconds; called by a thread that has nothing else to do."""
        until = time.monotonic() + grace_s
        while self.inside and time.monotonic() < until:
            time.sleep(_LOOK_S)


class Counting:
    """Lets requests through ``doors`` to ``app``."""

    def __init__(self, app: ASGIApp, doors: Doors) -> None:
        self._app, self._doors = app, doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            self._doors.check()
        except ClosedError as error:
            await refusing(error)(scope, receive, send)
            return
        self._doors.inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._doors.inside -= 1
