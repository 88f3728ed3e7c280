"""What a service waits for at its clients: heads and bodies that do not end, and connections that say nothing, are
limited for each and for all together. Clients that half close a connection, or offer another protocol, are answered.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from firsttoken_serve.http.error_responses import RETRY_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

MOST_BODY_BYTES = 1_000_000
MOST_HEAD_BYTES = 32 << 10
MOST_UNREAD_BYTES = 64 << 20  # of all heads and bodies that have not ended
_TRIMMED_BYTES = 8 << 20  # held at once, from where on the memory is given back to the system afterwards
SILENT_S = 20.0  # before the first byte of a head, also of the next one: longer than pools of clients keep connections
_LINGER_S = 1.0  # a connection that is closed while more comes would lose the answer on its way
_PROBE_S = 0.1  # between the first two probes of a client that has closed its half, and twice as long each further time
_STATUS = b"HTTP/1.1 "  # every response begins so


class Unread:
    """Counts bytes of heads and bodies that have not ended. It is used on the event loop alone."""

    def __init__(self, most: int = MOST_UNREAD_BYTES) -> None:
        self.most, self.held, self._peak = most, 0, 0

    def hold(self, count: int) -> None:
        """Hold ``count`` bytes more. Raises HTTPException (503) where that is more than all may hold."""
        if self.held + count > self.most:
            refusal = f"requests that have not ended hold {self.held >> 20} MiB, and no more is taken; send it again"
            raise HTTPException(503, refusal, headers={"Retry-After": str(RETRY_S), "Connection": "close"})
        self.held += count
        self._peak = max(self._peak, self.held)

    def release(self, count: int) -> None:
        """Let go of ``count`` bytes. Once nothing is held, memory that malloc keeps goes back to the system: 300 bodies
        of 900 kB left 270 MiB of it in the process."""
        self.held -= count
        if not self.held and self._peak > _TRIMMED_BYTES:
            self._peak = 0
            threading.Thread(target=_trim, name="trim", daemon=True).start()


def head_bytes(scope: Scope) -> int:
    """Return the bytes of the request line and the header lines of a request."""
    sizes = (len(name) + len(value) + 4 for name, value in scope["headers"])
    return sum(sizes) + len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")


class Connections:
    """The connections of a service, in the order in which they began to wait for their clients: while more than
    ``most`` are open, those that have waited for longest are closed. It is used on the event loop alone."""

    def __init__(self, most: int) -> None:
        self._most, self._open = most, dict[LimitedProtocol, None]()

    def enter(self, connection: LimitedProtocol) -> None:
        """Note that ``connection`` waits for its client from now on. A connection that is being answered is never
        closed for it."""
        self._open.pop(connection, None)
        if (excess := len(self._open) + 1 - self._most) > 0:
            for oldest in [other for other in self._open if other.waits][:excess]:
                self.leave(oldest)
                oldest.transport.abort()
        self._open[connection] = None

    def leave(self, connection: LimitedProtocol) -> None:
        """Note that ``connection`` has ended."""
        self._open.pop(connection, None)


def most_connections() -> int:
    """Return how many connections may be open: three quarters of the files that the process may, as the model has some
    too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else max(8, files - max(32, files // 4))


class _UpgradeParser(httptools.HttpRequestParser):
    """Reads the head of a request that offers another protocol once more without the offer, which a server may pass
    over: httptools ends at one, and the body is lost. Java's HttpClient offers h2c in each first request."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        super().__init__(protocol)
        self.protocol = protocol
        with suppress(AttributeError):  # as uvicorn does
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            protocol = self.protocol
            if not protocol.offers_upgrade:
                raise
            lines = [b": ".join(header) for header in protocol.headers if header[0] != b"upgrade"]
            first = b"%s %s HTTP/%s" % (self.get_method(), protocol.url, self.get_http_version().encode())
            protocol.parser = _UpgradeParser(protocol)
            protocol.parser.feed_data(b"\r\n".join([first, *lines, b"", data[upgrade.args[0] :]]))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits for what it waits for: a head begins within ``silent_s`` seconds, has
    ``MOST_HEAD_BYTES``, counts among what is ``unread``, and ends within ``patience_s`` seconds."""

    unread: Unread
    open_connections: Connections
    patience_s: float
    silent_s: float
    offers_upgrade = False  # to another protocol, in the head that was just read
    _head_open, _head_size = False, 0
    _held = 0
    _refused = _half_closed = _in_head = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _UpgradeParser(self)

    @property
    def answering(self) -> bool:
        """Return whether a request is not yet answered."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    @property
    def waits(self) -> bool:
        """Return whether the next bytes have to come from the client, be it a head or the rest of a body."""
        return not self.pipeline and (not self.answering or self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """asyncio calls this first."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """asyncio calls this when bytes have come; those of an unfinished head are counted."""
        if self._refused:
            return
        self._head_size += len(data)
        super().data_received(data)
        self._account(self._head_size if self._head_open else 0)
        if self.answering and not self._in_head:
            self._set_timer(0, None)

    def on_message_begin(self) -> None:
        """httptools calls this at the first byte of a head."""
        self._head_open = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """httptools calls this at the end of a head."""
        self._head_open, self._head_size = False, 0
        self.offers_upgrade = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if not self.offers_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """httptools calls this at the end of a request."""
        if not self.offers_upgrade:
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """httptools calls this for each part of a body."""
        self._head_size = 0
        super().on_body(body)

    def eof_received(self) -> bool:
        """asyncio calls this when the client will send no more: it waits for its answer, or has gone. Returns whether
        the connection stays."""
        if self._refused or self.waits:
            return False
        self._half_closed = True
        if not self.pipeline:
            self.cycle.keep_alive = False
            if not self.cycle.response_started:
                self.cycle.transport = _ProbingTransport(self.transport)
        return True

    def on_response_complete(self) -> None:
        """uvicorn calls this when a response has been written."""
        super().on_response_complete()
        if self.transport.is_closing() or self.answering:
            return
        if self._half_closed:
            self.transport.close()
        else:
            self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio calls this when the connection has ended; its bytes count no longer."""
        self._account(0)
        self._set_timer(0, None)
        self.open_connections.leave(self)
        super().connection_lost(error)

    def _await_head(self) -> None:
        self.open_connections.enter(self)
        if not self._in_head:
            self._set_timer(self.silent_s, lambda: self.transport.close())

    def _set_timer(self, seconds: float, expired: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = expired and asyncio.get_running_loop().call_later(seconds, expired)

    def _account(self, now: int) -> None:
        """Count ``now`` bytes of an unfinished head, and refuse one that is too long."""
        if now > MOST_HEAD_BYTES:
            self._refuse(431, f"the head of the request is longer than {MOST_HEAD_BYTES:,} bytes")
            now = 0
        try:
            if now > self._held:
                self.unread.hold(now - self._held)
            elif now < self._held:
                self.unread.release(self._held - now)
            self._held = now
        except HTTPException as error:
            self._refuse(error.status_code, error.detail)
            self._account(0)
        if bool(self._held) != self._in_head:
            self._in_head = bool(self._held)
            self._set_timer(self.patience_s, self._expire if self._in_head else None)

    def _expire(self) -> None:
        self._refuse(408, f"the head of the request did not end within {self.patience_s:g} s")
        self._account(0)

    def _refuse(self, status: int, reason: str) -> None:
        """Answer and close, once what is on its way has come."""
        self._refused = True
        body = reason.encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        transport: Any = self.transport
        transport.write(head.encode() + body)
        with suppress(OSError, RuntimeError):
            transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, transport.close)


def limited_protocol(unread: Unread, patience_s: float, silent_s: float = SILENT_S) -> type[asyncio.Protocol]:
    """The protocol of one service, whose connections have these limits together."""
    limits = {"unread": unread, "patience_s": patience_s, "silent_s": silent_s}
    return type("Protocol", (LimitedProtocol,), limits | {"open_connections": Connections(most_connections())})


class _ProbingTransport:
    """The transport of a response to a client that has closed its half. A write alone tells whether it reads or has
    gone: the bytes that every response begins with are sent one by one until it comes, and the system of a client that
    has gone answers the first with a reset, which ends the connection at the second."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._sent, self._begun = transport, 0, False
        self._probe_in(_PROBE_S)

    def write(self, data: bytes) -> None:
        self._transport.write(data if self._begun else data[self._sent :])
        self._begun = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _probe_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._probe, seconds)

    def _probe(self, seconds: float) -> None:
        if not self._begun and not self._transport.is_closing() and self._sent < len(_STATUS):
            self._transport.write(_STATUS[self._sent : self._sent + 1])
            self._sent += 1
            self._probe_in(2 * seconds)


def _trim() -> None:
    with suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
