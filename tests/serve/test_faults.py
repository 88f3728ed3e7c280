"""Clients that misbehave, over real sockets: each is told or let go, and the others notice nothing."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from services import ENDLESS, TIMEOUT_S, free_port, serving
from waiting import until

pytest.importorskip("starlette")

from firsttoken.__main__ import main

KEY = "sk-one-of-ours"
ASKED = {"prompt": "the inn", "max_tokens": 20, "temperature": 0}
HELD = {"prompt": ENDLESS, "max_tokens": 20_000, "stream": True}


@pytest.fixture(scope="module")
def url(tiny) -> Iterator[str]:
    """Of a service with little patience and few places."""
    limits = {"max_running": 3, "max_waiting": 2, "max_new_tokens": 20_000, "body_s": 1.5, "stalled_s": 1.0}
    with serving(tiny, **limits) as url:
        yield url


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[Future | None]:
    """Another client's answer is the same before, while and after each test; at the end nothing is open."""
    if "url" not in request.fixturenames:
        yield None
        return
    url = request.getfixturevalue("url")
    before = httpx.post(f"{url}/v1/completions", json=ASKED, timeout=TIMEOUT_S).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(httpx.post, f"{url}/v1/completions", json=ASKED | {"max_tokens": 80}, timeout=TIMEOUT_S)
        until(lambda: beside.done() or standing(url)[0], "it has its place before others take them")
        yield beside
        meanwhile = beside.result(TIMEOUT_S)
    assert meanwhile.status_code == 200
    assert meanwhile.json()["choices"][0]["text"].startswith(before[0]["text"].rstrip("\ufffd"))
    assert httpx.post(f"{url}/v1/completions", json=ASKED, timeout=TIMEOUT_S).json()["choices"] == before
    until(lambda: standing(url) == (0, 0, 0), "nothing is open, and every block is back")


def standing(url: str) -> tuple[int, int, int]:
    status = httpx.get(f"{url}/stage").json()
    return (
        status["sessions"],
        status["engine"]["running"] + status["engine"]["waiting"],
        status["engine"]["blocks_used"],
    )


def engine(url: str) -> tuple[int, int]:
    status = httpx.get(f"{url}/stage").json()["engine"]
    return status["running"], status["waiting"]


def connected(url: str, *, buffer: int | None = None) -> socket.socket:
    where = urlsplit(url)
    client = socket.socket()
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(TIMEOUT_S)
    client.connect((where.hostname, where.port))
    return client


def head(url: str, length: int, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Length: {length}\r\n\r\n".encode()


def posted(url: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    return head(url, len(content)) + content


def received(client: socket.socket) -> bytes:
    found = b""
    while part := client.recv(65536):
        found += part
    return found


def test_a_body_that_never_ends(url) -> None:
    with connected(url) as client:
        client.sendall(head(url, 100) + b'{"prompt"')
        answer = received(client)  # to the end: the connection is closed
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"body_timeout"' in answer
    assert b"the body did not end within 1.5 s" in answer


def test_a_body_that_breaks_off(url) -> None:
    with connected(url) as client:
        client.sendall(head(url, 100) + b'{"prompt"')


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_the_middle(url, stream) -> None:
    with connected(url) as client:
        client.sendall(posted(url, HELD | {"stream": stream, "n": 2}))
        until(lambda: standing(url)[0] >= 2, "it is open")
        if stream:
            assert client.recv(20).startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_at_once(url) -> None:
    for _ in range(5):
        with connected(url) as client:
            client.sendall(posted(url, HELD))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this kernel has no limit for what is not taken")
def test_a_client_that_reads_nothing(url) -> None:
    with connected(url, buffer=4096) as client:
        client.sendall(posted(url, HELD | {"logprobs": 20}))
        until(lambda: standing(url)[0] >= 1, "it is open")
        until(lambda: standing(url)[0] == 0, "it was given up")


def test_a_flood(url, undisturbed) -> None:
    """Places and queue are full: whoever comes then is told to come again, at once and in a line."""
    body = HELD | {"prompt": [ENDLESS] * 5}
    with ThreadPoolExecutor(8) as pool:
        undisturbed.result(TIMEOUT_S)  # all places are wanted
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as held:
            parts = held.iter_raw()
            next(parts)
            until(lambda: engine(url) == (3, 2), "three run and two wait")
            answers = list(pool.map(lambda _: httpx.post(f"{url}/v1/completions", json=ASKED), range(40)))
    assert {answer.status_code for answer in answers} == {429}
    assert all(answer.headers["retry-after"] == "1" for answer in answers)
    assert answers[0].json()["error"] == {
        "message": "5 requests are open, which is all that is served; try again later",
        "type": "rate_limit_error",
        "param": None,
        "code": "busy",
    }


def test_half_of_an_answer_is_no_place_taken(url, undisturbed) -> None:
    """Of several answers of which one finds no place none begins."""
    undisturbed.result(TIMEOUT_S)
    with httpx.stream("POST", f"{url}/v1/completions", json=HELD | {"n": 3}, timeout=TIMEOUT_S) as held:
        parts = held.iter_raw()
        next(parts)
        assert httpx.post(f"{url}/v1/completions", json=HELD | {"n": 3, "stream": False}).status_code == 429
        until(lambda: standing(url)[0] == 3, "only those that were there")


def test_what_is_no_http(url) -> None:
    for raw in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"POST\r\n\r\n"):
        with connected(url) as client:
            client.sendall(raw)
            assert received(client).startswith(b"HTTP/1.1 400")


class TestWhoIsLetIn:
    def test_no_page_of_another_origin(self, url) -> None:
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
                headers = {"Origin": origin, "Content-Type": kind}
                response = httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers)
                assert response.status_code == 403 and response.json()["error"]["code"] == "forbidden"

    def test_our_own_page_and_clients_without_one(self, url) -> None:
        for headers in ({"Origin": url}, {}):
            assert httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers).status_code == 200

    def test_our_own_page_behind_a_proxy(self, url) -> None:
        """Under the name of a hub that is asked by https, whether the proxy says that name as the Host or not."""
        hub, others = "hub.example", ("cross-site", "same-site", "none", "")
        for host in (urlsplit(url).netloc, hub):
            named = {"Host": host, "Sec-Fetch-Site": "same-origin"}
            page = httpx.get(url, headers=named | {"Sec-Fetch-Site": "none"})
            assert page.status_code == httpx.get(f"{url}/stage", headers=named).status_code == 200
            asked = functools.partial(httpx.post, f"{url}/v1/completions", json=ASKED)
            assert asked(headers=named | {"Origin": f"https://{hub}"}).status_code == 200
            for site in others:
                headers = named | {"Origin": "https://evil.example", "Sec-Fetch-Site": site}
                assert asked(headers=headers).status_code == 403
        rebound = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
        assert asked(headers=rebound).status_code == 403

    def test_no_name_that_only_resolves_to_this_machine(self, url) -> None:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
            assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 403
        for host in ("localhost", "[::1]:8000", "[::1]", "127.0.0.2:1"):
            assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200

    def test_the_key_and_nothing_else(self, tiny) -> None:
        with serving(tiny, api_key=KEY) as url:
            for told in (
                None,
                "",
                KEY,
                "Basic " + KEY,
                "Bearer",
                "Bearer " + KEY[:-1],
                f"Bearer {KEY}x",
                "Bearer \xe9",
            ):
                headers = {} if told is None else {"Authorization": told.encode("latin-1")}
                response = httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                error = response.json()["error"]
                assert error["code"] == "invalid_api_key" and "missing or wrong" in error["message"]
            headers = {"Authorization": f"Bearer {KEY}"}
            assert httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers).status_code == 200
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("what", ["nowhere", "empty", "pickled"])
def test_a_folder_that_is_no_model_is_one_line_on_the_console(tmp_path, capsys, what) -> None:
    folder = tmp_path / what
    if what != "nowhere":
        folder.mkdir()
    if what == "pickled":
        (folder / "config.json").write_text("{}")
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert main(["serve", str(folder), "--port", str(free_port())]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert not said.out and line.startswith("firsttoken: ") and str(folder) in line


def test_what_the_engine_does_not_have_is_one_line_on_the_console(tiny, capsys) -> None:
    options = [("--scheduler", "fastest"), ("--preemption", "never"), ("--preemption", "oracle")]
    options.append(("--token-budget", "63"))  # of 64 requests each may ask for its next token in one step
    for option, value in options:
        assert main(["serve", str(tiny), "--port", str(free_port()), option, value]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert value in line


def test_a_key_file_that_cannot_be_used(tiny, tmp_path, capsys) -> None:
    for content in (None, "", "two\nlines", "\u00e9"):
        file = tmp_path / "key"
        if content is not None:
            file.write_text(content, encoding="utf-8")
        assert main(["serve", str(tiny), "--api-key-file", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "API key" in line and "two" not in line
