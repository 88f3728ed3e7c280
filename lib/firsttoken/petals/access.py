"""Says which clients may reach a server: those of this machine, or, with TLS and a token, those that have both."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from firsttoken.petals.addresses import host_of, is_loopback
from firsttoken.petals.messages import most_bytes
from firsttoken.study.errors import SwarmError

if TYPE_CHECKING:
    import grpc

Channel: TypeAlias = "grpc.aio.Channel"
"""A connection to a server. Its package is imported when the first one is made."""

Headers: TypeAlias = tuple[tuple[str, str], ...]

# The thread that waits for a message reads it from its connection itself, instead of being woken by another that does:
# one of a step takes 0.08 ms from here to a process beside instead of 0.13 (gRPC 1.85, which reads this when imported).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

_LONGEST = 1 << 16  # bytes of a file that is read here
_KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000))


@dataclass(frozen=True)
class Access:
    """``token`` is told to every server and asked of every client; ``authority`` is the PEM certificate that servers
    are known by, ``certificate`` and ``key`` a server's own. Nothing of it is needed on loopback."""

    token: str = ""
    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = b""

    @classmethod
    def read(cls, token: Path | None, authority: Path | None, certificate: Path | None, key: Path | None) -> Access:
        """Read the access from files. Raises SwarmError for one that cannot be read."""
        contents = [_read(path) for path in (token, authority, certificate, key)]
        return cls(contents[0].decode("ascii", "replace").strip(), *contents[1:])

    @property
    def secure(self) -> bool:
        """Return whether connections to other machines are possible: there is a certificate to know them by."""
        return bool(self.authority or self.certificate)

    @property
    def headers(self) -> Headers:
        """The headers that a client sends with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def admits(self, headers: dict[str, str]) -> bool:
        """Return whether a call with these headers has the token."""
        header = headers.get("authorization", "")
        return not self.token or hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode())

    def listen(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Bind ``server`` and return its port. Raises SwarmError for an address beyond this machine without TLS and a
        token, and for one that cannot be had."""
        import grpc

        secure = bool(self.certificate and self.key)
        if not is_loopback(host) and not (secure and self.token):
            raise SwarmError(
                f"{host} can be reached from other machines: give --tls-cert, --tls-key and --token-file, or stay on "
                "127.0.0.1"
            )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if not secure:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, grpc.ssl_server_credentials([(self.key, self.certificate)]))
        except RuntimeError as error:
            raise SwarmError(f"cannot listen on {address}: choose another --port") from error

    def channel(self, address: str, width: int, trained: int = 0) -> Channel:
        """A connection to the server at ``address``, for messages of at most ``most_bytes`` of hidden states.

        Raises SwarmError for an address beyond this machine without a certificate to know it by.
        """
        import grpc

        limit = most_bytes(width, trained)
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.use_local_subchannel_pool", 1),  # a channel that is closed takes its connection with it
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 500),  # a server that is back is used within this
            ("grpc.enable_http_proxy", 0),
            *_KEEPALIVE,
        ]
        if self.secure:
            known_by = self.authority or self.certificate  # which is its own authority where all servers share it
            return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(known_by), options)
        if not is_loopback(host_of(address)):
            raise SwarmError(f"{address} is on another machine: give --tls-ca, the certificate that it is known by")
        return grpc.aio.insecure_channel(address, options)


class CallError(SwarmError):
    """A call that has no answer; gRPC's ``code`` is the name of the status that it ended with, "" for none."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


async def answer_of(
    method: Callable[..., Awaitable[bytes]], message: bytes | Iterable[bytes], headers: Headers, limit_s: float
) -> bytes:
    """Return what a server answers to ``message`` by ``method`` of a channel. Raises CallError where that is nothing,
    or does not come within ``limit_s`` seconds."""
    import grpc

    try:
        async with asyncio.timeout(limit_s):  # gRPC's own ends by the wall clock
            return await method(message, metadata=headers)
    except TimeoutError:
        raise CallError(f"it did not answer within {limit_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise CallError(error.details() or error.code().name, error.code().name) from error
    except grpc.aio.BaseError as error:
        raise CallError(f"its connection was closed ({error})") from error
    except asyncio.CancelledError:  # of the call, as somebody else has given its connection up, or of whoever asks
        if asyncio.current_task().cancelling():
            raise
        raise CallError("its connection was closed") from None


def check_installed() -> None:
    """Raises SwarmError where a swarm's packages are not installed."""
    if missing := [name for name in ("grpc", "cryptography") if find_spec(name) is None]:
        raise SwarmError(f'{missing[0]} is not installed: pip install -e ".[swarm]" in the clone')


def server_options(width: int, trained: int = 0) -> list[tuple[str, int]]:
    """Return gRPC's options for a server: messages larger than ``most_bytes`` of hidden states are refused unread.

    Its port is its own: no other server may listen at it.
    """
    limit = most_bytes(width, trained)
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        *_KEEPALIVE,
    ]


def _read(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        content = path.read_bytes()[: _LONGEST + 1]
    except OSError as error:
        raise SwarmError(f"{path} cannot be read: {error.strerror}") from error
    if not content.strip() or len(content) > _LONGEST:
        raise SwarmError(f"{path} is empty or too long for a token, certificate or key: name another file")
    return content
