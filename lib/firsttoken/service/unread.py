"""What clients have begun to send and not ended: limited for each, and for all connections together."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from firsttoken.service.error_responses import RETRY_S

if TYPE_CHECKING:
    from starlette.types import Scope

MOST_BODY_BYTES = 1_000_000
MOST_HEAD_BYTES = 32 << 10
MOST_UNREAD_BYTES = 64 << 20  # of all heads and bodies that have not ended
_TRIMMED_BYTES = 8 << 20  # held at once, from where on the memory is given back to the system afterwards
_LINGER_S = 1.0  # a connection that is closed while more comes would lose the answer on its way


class Unread:
    """Counts bytes of heads and bodies that have not ended. It is used on the event loop alone."""

    def __init__(self, most: int = MOST_UNREAD_BYTES) -> None:
        self.most, self.held, self._peak = most, 0, 0

    def take(self, count: int) -> None:
        """Hold ``count`` bytes more. Raises HTTPException (503) where that is more than all may hold."""
        if self.held + count > self.most:
            told = f"requests that have not ended hold {self.held >> 20} MiB, and no more is taken; send it again"
            raise HTTPException(503, told, headers={"Retry-After": str(RETRY_S), "Connection": "close"})
        self.held += count
        self._peak = max(self._peak, self.held)

    def give_back(self, count: int) -> None:
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


def limited_protocol(unread: Unread, patience_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, where a head has ``MOST_HEAD_BYTES``, counts among what is ``unread``, and ends within
    ``patience_s`` seconds."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:  # it is faster, and need not be installed
        return _limited_h11(unread, patience_s)

    class LimitedHttpTools(_Limited, HttpToolsProtocol):
        _head_open, _head_size = False, 0

        def data_received(self, data: bytes) -> None:
            self._head_size += len(data)
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._head_open = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head_open, self._head_size = False, 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._head_size = 0
            super().on_body(body)

        def pending(self) -> int:
            return self._head_size if self._head_open else 0

    return type("Protocol", (LimitedHttpTools,), {"unread": unread, "patience_s": patience_s})


def _limited_h11(unread: Unread, patience_s: float) -> type[asyncio.Protocol]:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class LimitedH11(_Limited, H11Protocol):
        def pending(self) -> int:
            return len(self.conn.trailing_data[0]) if self.conn.their_state is h11.IDLE else 0

    return type("Protocol", (LimitedH11,), {"unread": unread, "patience_s": patience_s})


class _Limited:
    """Limits the heads that a protocol of uvicorn reads; its ``pending`` returns the bytes of an unfinished head."""

    unread: Unread
    patience_s: float
    _held = 0
    _refused = False
    _late: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """asyncio calls this when bytes have come; those of an unfinished head are counted."""
        if self._refused:
            return
        super().data_received(data)
        self._account(self.pending())

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio calls this when the connection has ended; its bytes count no longer."""
        self._account(0)
        super().connection_lost(error)

    def _account(self, now: int) -> None:
        """``now`` bytes of a head are there."""
        if now > MOST_HEAD_BYTES:
            self._refuse(431, f"the head of the request is longer than {MOST_HEAD_BYTES:,} bytes")
            now = 0
        try:
            if now > self._held:
                self.unread.take(now - self._held)
            elif now < self._held:
                self.unread.give_back(self._held - now)
            self._held = now
        except HTTPException as error:
            self._refuse(error.status_code, error.detail)
            self._account(0)
        if self._held and self._late is None:
            self._late = asyncio.get_running_loop().call_later(self.patience_s, self._expire)
        elif not self._held and self._late is not None:
            self._late.cancel()
            self._late = None

    def _expire(self) -> None:
        self._late = None
        self._refuse(408, f"the head of the request did not end within {self.patience_s:g} s")
        self._account(0)

    def _refuse(self, status: int, told: str) -> None:
        """Answer and close, once what is on its way has come."""
        self._refused = True
        body = told.encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        transport: Any = self.transport
        transport.write(head.encode() + body)
        with suppress(OSError, RuntimeError):
            transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, transport.close)


def _trim() -> None:
    with suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
