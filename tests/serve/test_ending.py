"""A service that is told to end, as its own process: what runs may end, nothing new is taken, a second signal waits for
nobody."""

from __future__ import annotations

import functools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from services import ENDLESS, TIMEOUT_S, free_port, write_endless
from waiting import until

pytest.importorskip("uvicorn")

STREAMS, TOKENS, LONG = 16, 60, 16_000  # the last of them takes longer than a test


@contextmanager
def service(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The URL and process of a service whose model is there."""
    port = free_port()
    command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"

    def complete() -> bool:
        assert process.poll() is None, process.stderr.read()
        try:
            return httpx.get(f"{url}/stage").json()["state"] == "complete"
        except httpx.TransportError:
            return False

    try:
        until(complete, "the model is there")
        yield url, process
    finally:
        process.kill()
        process.communicate()


def asked(tokens: int, **more: object) -> dict:
    return {"prompt": ENDLESS, "max_tokens": tokens, "temperature": 0} | more


class Held:
    """A stream of which one event has been read."""

    def __init__(self, url: str, tokens: int) -> None:
        self._client = httpx.Client(timeout=TIMEOUT_S)
        request = self._client.build_request("POST", f"{url}/v1/completions", json=asked(tokens, stream=True))
        self._answer = self._client.send(request, stream=True)
        self._lines = self._answer.iter_lines()
        self.first = next(line for line in self._lines if line)

    def rest(self) -> list[str]:
        """The events that come until it ends."""
        lines = [self.first, *(line for line in self._lines if line)]
        self._client.close()
        return [line.removeprefix("data: ") for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder whose answers do not end by themselves."""
    at = tmp_path_factory.mktemp("ending") / "endless"
    write_endless(at)
    return at


@contextmanager
def half_a_request(url: str, ends: bool = True) -> Iterator[None]:
    """A request whose body has not ended, which keeps the service from its end; it is not taken when it ends."""
    where, body = urlsplit(url), json.dumps(asked(1)).encode()
    with socket.create_connection((where.hostname, where.port), TIMEOUT_S) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: {len(body)}\r\n"
        client.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 100")  # it is inside, and its body is asked for
        client.sendall(body[:-1])
        yield
        if ends:
            client.sendall(body[-1:])
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 503")


def test_streams_that_run_end_whole_and_nothing_new_is_taken(folder: Path) -> None:
    """Sixteen streams and a whole answer are under way when SIGTERM comes."""
    with service(folder, "--grace-s", str(TIMEOUT_S)) as (url, process), ThreadPoolExecutor() as pool:
        alone = httpx.post(f"{url}/v1/completions", json=asked(TOKENS), timeout=TIMEOUT_S).json()["choices"][0]["text"]
        with half_a_request(url):
            streams = list(pool.map(lambda _: Held(url, TOKENS), range(STREAMS)))
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json=asked(TOKENS), timeout=TIMEOUT_S)
            until(lambda: answer.done() or httpx.get(f"{url}/stage").json()["sessions"] >= 1, "it is taken")
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").json()["state"] == "closing", "it has heard")
            for path, body in (("completions", asked(1)), ("chat/completions", {"messages": []})):
                new = httpx.post(f"{url}/v1/{path}", json=body, timeout=TIMEOUT_S)
                assert new.status_code == 503 and "shutting down" in new.json()["error"]["message"]
                assert new.headers["Retry-After"] and new.json()["error"]["code"] == "shutting_down"
            for stream in streams:
                *chunks, done = stream.rest()
                assert done == "[DONE]"
                choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
                assert "".join(choice["text"] for choice in choices) == alone
                assert choices[-1]["finish_reason"] == "length"
            assert answer.result().status_code in (200, 503)  # it may have come behind the signal
        assert process.wait(TIMEOUT_S) == 0


def test_what_outlasts_the_grace_is_told(folder: Path) -> None:
    """A stream by an event before its end, a whole answer by 503."""
    with service(folder, "--grace-s", "0", "--max-running", "1") as (url, process), ThreadPoolExecutor() as pool:
        stream = Held(url, LONG)
        ask = functools.partial(httpx.post, f"{url}/v1/completions", json=asked(LONG), timeout=TIMEOUT_S)
        answers = [pool.submit(ask) for _ in range(4)]
        until(lambda: httpx.get(f"{url}/stage").json()["sessions"] == 5, "they are taken")
        process.send_signal(signal.SIGINT)
        *_, error, done = stream.rest()
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "shutting_down"
        for answer in answers:
            told = answer.result()
            assert told.status_code == 503 and told.headers["Retry-After"]
            assert told.json()["error"]["message"] == "the server was closed"
        assert process.wait(TIMEOUT_S) == 0


def test_a_second_signal_waits_for_nobody(folder: Path) -> None:
    """The grace has hours to go."""
    with service(folder, "--grace-s", "9999") as (url, process), half_a_request(url, ends=False):
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health").json()["state"] == "closing", "it has heard")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_connected_before_the_service_had_started_is_answered(folder: Path, number: signal.Signals) -> None:
    """The port listens while what serves is still imported; the signal comes at once."""
    port = free_port()
    command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port), "--grace-s", "30"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    body = json.dumps(asked(4)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    clients = []

    def connected() -> bool:
        with suppress(ConnectionRefusedError):
            clients.append(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
        return bool(clients)

    try:
        until(connected, "the port is open")
        with clients[0] as client:
            client.sendall(head + body)
            process.send_signal(number)
            assert client.recv(1 << 16).split()[1] in (b"200", b"503")
        out, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out, errors) == (0, "shutting down\n", "")
    finally:
        process.kill()
        process.communicate()
