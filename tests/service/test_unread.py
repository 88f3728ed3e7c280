"""Heads and bodies that do not end: limited for each connection, and for all together."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from services import TIMEOUT_S, serving

pytest.importorskip("uvicorn")

from firsttoken.service.unread import MOST_BODY_BYTES, MOST_HEAD_BYTES, MOST_UNREAD_BYTES

LIMITS = {"max_new_tokens": 64, "body_s": 5.0}


@pytest.fixture(scope="module")
def url(plain) -> Iterator[str]:
    """Of a service with some patience."""
    with serving(plain, **LIMITS) as url:
        yield url


def sent(url: str, data: bytes) -> socket.socket:
    """A connection over which ``data`` went, or as much as was taken."""
    where = urlsplit(url)
    client = socket.create_connection((where.hostname, where.port), TIMEOUT_S)
    with suppress(OSError):
        client.sendall(data)
    return client


def status(client: socket.socket) -> int:
    """Of the answer."""
    return int(client.recv(1 << 16).split()[1])


def head(url: str, more: str) -> bytes:
    return f"GET /health HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{more}".encode()


@pytest.mark.parametrize("size", [MOST_HEAD_BYTES + 1, 100_000])
@pytest.mark.parametrize("end", ["\r\n\r\n", ""], ids=["whole", "open"])
def test_a_head_that_is_too_long_is_431(url: str, size: int, end: str) -> None:
    """Whether it ends or not, in one line or in many."""
    for lines in (f"X-A: {'a' * size}", "".join(f"X-{i}: {'a' * 90}\r\n" for i in range(size // 90)) + "X: b"):
        with sent(url, head(url, lines + end)) as client:
            assert status(client) == 431


def test_a_head_of_usual_size_is_taken(url: str) -> None:
    """Half of what is allowed."""
    answer = httpx.get(f"{url}/health", headers={"X-A": "a" * (MOST_HEAD_BYTES // 2)})
    assert answer.status_code == 200


def test_a_head_that_does_not_end_is_408(url: str) -> None:
    """After as long as a body may take."""
    with sent(url, head(url, "X-A: b")) as client:
        assert status(client) == 408


def test_bodies_that_do_not_end_are_limited_together(url: str) -> None:
    """Those beyond are 503 and told when to come again; when all are gone, there is room again."""
    size = MOST_BODY_BYTES - 1000
    body = head(url, "").replace(b"GET /health", b"POST /v1/completions") + f"Content-Length: {size}\r\n\r\n".encode()
    body += b"x" * (size - 1)
    with ExitStack() as stack:
        for _ in range(MOST_UNREAD_BYTES // size):
            stack.enter_context(sent(url, body))
        assert status(stack.enter_context(sent(url, body))) == 503
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "the", "max_tokens": 1}, timeout=TIMEOUT_S)
    assert answer.status_code == 200
