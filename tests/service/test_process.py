"""The service as one process, over real HTTP: many streams at once, clients that go, and an end that leaves nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from services import ENDLESS, TIMEOUT_S, serving, until


@pytest.fixture(scope="module")
def url(tiny) -> Iterator[str]:
    """A service whose stages have all arrived; at the end no thread of it is left."""
    before = set(threading.enumerate())
    with serving(tiny, max_running=16, max_waiting=0, max_new_tokens=20_000) as url:
        yield url
    until(lambda: not {t for t in threading.enumerate() if not t.daemon or t.name == "http"} - before, "it has ended")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def streamed(
    url: str, prompt: str | list[int], tokens: int, under_way: threading.Event | None = None
) -> tuple[str, str]:
    """The text of a streamed answer, and what its last event says: "[DONE]", or why there is no more.

    ``under_way`` is set once several events have come.
    """
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
        came = bytearray()
        for delta in answer.iter_bytes():
            came += delta
            if under_way and len(came) > 4096:
                under_way.set()
        lines = [line.removeprefix("data: ") for line in came.decode().split("\n") if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk)
    return text, next((chunk["error"]["message"] for chunk in chunks if "error" in chunk), lines[-1])


def whole(url: str, prompt: list[int], tokens: int) -> str:
    """The same answer, all at once."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()["choices"][0]["text"]


def test_sixteen_streams_at_once_are_what_each_is_alone(url) -> None:
    prompts = [[number + 1, 20, 31, 42] for number in range(16)]
    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(lambda prompt: streamed(url, prompt, 24), prompts))
    assert together == [(whole(url, prompt, 24), "[DONE]") for prompt in prompts]


def test_a_client_that_leaves_gives_its_place_back(url) -> None:
    body = {"prompt": ENDLESS, "max_tokens": 20_000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
        chunks = answer.iter_raw()  # without a name it would be closed, and the connection with it
        next(chunks)
        assert httpx.get(f"{url}/stage").json()["sessions"] == 1
    until(lambda: httpx.get(f"{url}/stage").json()["sessions"] == 0, "the session is gone")


def test_who_is_open_at_the_end_is_told(tiny) -> None:
    with ThreadPoolExecutor(1) as client:
        with serving(tiny, max_new_tokens=20_000) as url:
            under_way = threading.Event()
            open_one = client.submit(streamed, url, ENDLESS, 20_000, under_way)
            assert under_way.wait(TIMEOUT_S)
        text, why = open_one.result(TIMEOUT_S)
    assert text and why == "the server was closed"
