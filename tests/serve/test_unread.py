"""Heads and bodies that do not end, and clients that say nothing: limited for each connection, and for all together.
Who half closes a connection, offers another protocol or speaks HTTP/1.0 is answered.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from services import ENDLESS, TIMEOUT_S, serving, until

pytest.importorskip("uvicorn")

from firsttoken_serve.http import unread
from firsttoken_serve.http.unread import MOST_BODY_BYTES, MOST_HEAD_BYTES, MOST_UNREAD_BYTES


@pytest.fixture(scope="module")
def url(plain) -> Iterator[str]:
    """Of a service with some patience."""
    with serving(plain, body_s=5.0) as url:
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


def test_bodies_that_do_not_end_are_limited_together(plain: Path) -> None:
    """The first that finds no room is 503 and told when to come again; when all are gone, there is room again."""
    size = MOST_BODY_BYTES - 1000
    with serving(plain, body_s=TIMEOUT_S) as url:  # none of them is 408 before the last has come
        body = post(b"x" * size).removesuffix(b"x")
        with ExitStack() as stack:
            clients = {stack.enter_context(sent(url, body)) for _ in range(MOST_UNREAD_BYTES // size + 1)}
            ready, _, _ = select.select(clients, [], [], TIMEOUT_S)  # one, whichever was read last
            assert [status(client) for client in ready] == [503]
            assert not select.select(clients - set(ready), [], [], 0.1)[0]
        until(lambda: httpx.post(f"{url}/v1/completions", content=b"x" * size).status_code == 400, "all are let go")


ASKED = json.dumps({"prompt": "the inn", "max_tokens": 4, "temperature": 0, "ignore_eos": True}).encode()
STREAMED = ASKED.replace(b"{", b'{"stream": true, ', 1)
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


def post(body: bytes, more: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n"
    return head % (version, more, len(body)) + body


def rest(client: socket.socket) -> bytes:
    """What comes until the connection ends."""
    came = b""
    while data := client.recv(1 << 16):
        came += data
    return came


class TestHalfClosed:
    """A client that has sent its request and closed its half."""

    @pytest.mark.parametrize("body", [ASKED, STREAMED], ids=["whole", "streamed"])
    @pytest.mark.parametrize("version", [b"1.1", b"1.0"])
    def test_it_is_answered(self, url: str, body: bytes, version: bytes) -> None:
        with sent(url, post(body, version=version)) as client:
            client.shutdown(socket.SHUT_WR)
            answer = rest(client)
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"length"' in answer

    def test_an_answer_that_takes_long_is_whole(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bytes that tell whether it reads are the first of the answer."""
        monkeypatch.setattr(unread, "_PROBE_S", 0.001)
        with sent(url, post(ASKED.replace(b"4,", b"64,"))) as client:
            client.shutdown(socket.SHUT_WR)
            head, body = rest(client).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and json.loads(body)["usage"]["completion_tokens"] == 64

    def test_all_of_a_pipeline_are_answered(self, url: str) -> None:
        with sent(url, 3 * post(ASKED)) as client:
            client.shutdown(socket.SHUT_WR)
            assert rest(client).count(b"HTTP/1.1 200 ") == 3

    def test_who_has_gone_is_not_computed_for(self, url: str) -> None:
        """It looks alike until something is written to it."""
        with sent(url, post(json.dumps({"prompt": ENDLESS, "max_tokens": 9000, "ignore_eos": True}).encode())):
            until(lambda: httpx.get(f"{url}/stage").json()["sessions"], "it is taken")
        until(lambda: not httpx.get(f"{url}/stage").json()["sessions"], "it is let go", 20)

    def test_a_request_that_is_not_whole_ends_the_connection(self, url: str) -> None:
        for part in (post(ASKED)[:-1], post(ASKED)[:20], b""):
            with sent(url, part) as client:
                client.shutdown(socket.SHUT_WR)
                assert rest(client) == b""


@pytest.mark.parametrize("offer", [H2C, b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"Upgrade: TLS/1.0\r\n"])
def test_an_offer_of_another_protocol_is_passed_over(url: str, offer: bytes) -> None:
    """Also in pieces, in chunks, and before another request on the connection."""
    chunks = post(b"", offer).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"%x\r\n" % len(ASKED)
    chunks += ASKED + b"\r\n0\r\n\r\n"
    with sent(url, post(ASKED, offer) + chunks) as client:
        for piece in (post(ASKED, offer)[:100], post(ASKED, offer)[100:], post(ASKED, b"Connection: close\r\n")):
            time.sleep(0.05)
            client.sendall(piece)
        answers = rest(client)
    assert answers.count(b"HTTP/1.1 200 ") == 4 and answers.count(b'"length"') == 4


def test_http_of_old_needs_no_host(url: str) -> None:
    """haproxy's check has none, and no browser speaks it; a page's request is refused all the same."""
    for request, wanted in (
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (post(ASKED, version=b"1.0").replace(b"Host: localhost\r\n", b""), b"200"),
        (post(ASKED, b"Origin: null\r\n", b"1.0").replace(b"Host: localhost\r\n", b""), b"403"),
        (b"GET /v1/models HTTP/1.0\r\nHost: evil.example\r\n\r\n", b"403"),
    ):
        with sent(url, request) as client:
            assert rest(client).split()[1] == wanted


@pytest.fixture(scope="module")
def scarce(plain: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a service that may have 40 files open, so 8 connections, each silent for so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (40, 40))
        patch.setattr(unread.limited_protocol, "__defaults__", (request.param,))
        with serving(plain, body_s=TIMEOUT_S) as url:
            yield url


class TestSilence:
    """Connections that say nothing, or not enough."""

    @pytest.mark.parametrize("scarce", [1.5], indirect=True)
    @pytest.mark.parametrize("data", [b"", b"\r\n", post(ASKED)], ids=["nothing", "lines", "a request"])
    def test_it_ends(self, scarce: str, data: bytes) -> None:
        """Before the first byte of a head, also of the next one."""
        with sent(scarce, data) as client:
            assert rest(client).count(b"HTTP/1.1 200") == (data == post(ASKED))

    @pytest.mark.parametrize("scarce", [1.5], indirect=True)
    def test_trickling_lines_are_silence(self, scarce: str) -> None:
        with sent(scarce, b"\r\n") as client:
            client.settimeout(0.1)
            until(lambda: _is_closed(client), "it is closed", 20)

    @pytest.mark.parametrize("scarce", [TIMEOUT_S], indirect=True)  # nobody is closed for being silent
    @pytest.mark.parametrize("data", [b"", post(ASKED)[:20], post(ASKED)[:-1]], ids=["nothing", "a head", "a body"])
    def test_the_oldest_give_way(self, scarce: str, data: bytes) -> None:
        """Who is answered does not."""
        with ExitStack() as stack:
            streamed = post(STREAMED.replace(b"4,", b"1500,"), b"Connection: close\r\n")
            running = stack.enter_context(sent(scarce, streamed))
            running.recv(1 << 16)
            silent = [stack.enter_context(sent(scarce, data)) for _ in range(12)]
            for client in silent[:4]:
                with suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            assert httpx.get(f"{scarce}/health").status_code == 200
            assert rest(running).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def _is_closed(client: socket.socket) -> bool:
    try:
        client.sendall(b"\r\n")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
