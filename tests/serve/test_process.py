"""The service as one process, over real HTTP: many streams at once, and an end that leaves nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from services import GREEDY, TIMEOUT_S, events, said, serving
from waiting import until


@pytest.fixture(scope="module")
def url(tiny) -> Iterator[str]:
    """A service whose stages have all arrived; at the end no thread of it is left."""
    before = set(threading.enumerate())
    with serving(tiny, max_running=16, max_waiting=0, max_new_tokens=20_000) as url:
        yield url
    until(lambda: not {t for t in threading.enumerate() if not t.daemon or t.name == "http"} - before, "it has ended")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def streamed(url: str, prompt: list[int]) -> str:
    """The text of an answer that came in events, which end as they should."""
    body = GREEDY | {"prompt": prompt, "max_tokens": 24, "stream": True, "ignore_eos": True}
    chunks = events(httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S))
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_sixteen_streams_at_once_are_what_each_is_alone(url) -> None:
    prompts = [[number + 1, 20, 31, 42] for number in range(16)]
    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(lambda prompt: streamed(url, prompt), prompts))
    assert together == [said(url, prompt, max_tokens=24) for prompt in prompts]
