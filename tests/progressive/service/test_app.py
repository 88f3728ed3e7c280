"""A replica's application with a real server behind it, asked in this process: answers, refusals, failures."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from plain_tokens import generated
from transformers import AutoModelForCausalLM

pytest.importorskip("fastapi")

from firsttoken.link import Link
from firsttoken.progressive.recovery.limits import GrowthConfig
from firsttoken.progressive.recovery.server import GrowingServer
from firsttoken.progressive.service.app import Replica, build_app
from firsttoken.progressive.service.text import read_vocabulary

LIMITS = GrowthConfig(max_sessions=2, max_prompt_tokens=64, max_new_tokens=400, retry_s=0.05)
Ask = Callable[..., Any]


@pytest.fixture
def started() -> Iterator[Callable[..., GrowingServer]]:
    """Starts servers, and closes them at the end."""
    servers: list[GrowingServer] = []

    def start(folder: Path, link: Link | None = None, stage: int = 3) -> GrowingServer:
        servers.append(GrowingServer(folder, [link or Link()], LIMITS))
        servers[-1].start()
        assert not stage or servers[-1].wait_stage(stage, timeout_s=120)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def client_of(server: GrowingServer, folder: Path, stop_ids: tuple[int, ...] = ()) -> httpx.AsyncClient:
    vocabulary = read_vocabulary(folder, LIMITS.max_prompt_tokens)
    vocabulary.stop_ids = stop_ids
    app = build_app(Replica(server, vocabulary, "tiny", "the-replica"), server)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300)


@pytest.fixture
def ask(started, tiny) -> Ask:
    """Sends one request to a replica whose stages have all arrived."""
    server = started(tiny)

    def send(method: str, path: str, stop_ids: tuple[int, ...] = (), **request: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            async with client_of(server, tiny, stop_ids) as client:
                return await client.request(method, path, **request)

        return asyncio.run(once())

    return send


def completion(ask: Ask, stop_ids: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    response = ask("POST", "/v1/completions", stop_ids, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as it should."""
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def expected_ids(folder: Path, prompt_ids: list[int], count: int) -> list[int]:
    """What stock transformers generates from the staged folder."""
    return generated(AutoModelForCausalLM.from_pretrained(folder).eval(), prompt_ids, count).exact()


class TestCompletion:
    def test_is_what_transformers_generates(self, ask, tiny):
        vocabulary = read_vocabulary(tiny, 64)
        prompt_ids = vocabulary.prompt_ids("the inn")
        body = completion(ask, prompt="the inn", max_tokens=24)
        (choice,) = body["choices"]
        assert choice["text"] == vocabulary.tokenizer.decode(expected_ids(tiny, prompt_ids, 24))
        assert choice["finish_reason"] == "length" and body["stage"] == 3
        assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
        assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
        assert completion(ask, prompt=prompt_ids, max_tokens=24)["choices"] == body["choices"]

    def test_streamed_is_the_same_text_a_chunk_a_token(self, ask):
        fields = {"prompt": "the inn", "max_tokens": 24, "model": "tiny"}
        whole = completion(ask, **fields)
        response = ask("POST", "/v1/completions", json=fields | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-replica"] == "the-replica"
        chunks = events(response)
        assert len(chunks) == 25 and {chunk["stage"] for chunk in chunks} == {3}
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * 24 + ["length"]
        assert len({chunk["id"] for chunk in chunks}) == 1 and not any("usage" in chunk for chunk in chunks)

    def test_usage_comes_last_when_it_is_asked_for(self, ask):
        fields = {"prompt": "the", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(ask("POST", "/v1/completions", json=fields))
        assert len(chunks) == 4 and all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}

    def test_ends_before_a_stop_text(self, ask):
        text = completion(ask, prompt="the inn", max_tokens=40)["choices"][0]["text"]
        stop = text[20:23]  # of several tokens
        body = completion(ask, prompt="the inn", max_tokens=40, stop=["never there", stop])
        assert body["choices"][0]["text"] == text[: text.index(stop)]
        assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] < 40

    def test_ends_at_a_token_that_ends_answers(self, ask, tiny):
        ids = expected_ids(tiny, read_vocabulary(tiny, 64).prompt_ids("the inn"), 24)
        end = next(i for i in range(5, 24) if ids[i] not in ids[:i])
        body = completion(ask, (ids[end],), prompt="the inn", max_tokens=24)
        assert body["choices"][0]["text"] == read_vocabulary(tiny, 64).tokenizer.decode(ids[:end])
        assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] == end + 1


class TestRefusals:
    @pytest.mark.parametrize(
        "request_, status, code, message",
        [
            (("POST", "/v1/completions", b"{"), 400, "bad_request", "the body is no JSON"),
            (("POST", "/v1/completions", b'{"prompt": "hi", "n": 2}'), 400, "bad_request", "n: only 1 is served"),
            (("POST", "/v1/completions", b'{"prompt": ""}'), 400, "bad_request", "prompt: it is empty"),
            (
                ("POST", "/v1/completions", json.dumps({"prompt": "a" * 65}).encode()),
                *(400, "bad_request", "prompt: 65 tokens, and the limit is 64"),
            ),
            (
                ("POST", "/v1/completions", json.dumps({"prompt": "a" * 1000}).encode()),
                *(400, "bad_request", "prompt: 1000 characters cannot be 64 tokens, the limit"),
            ),
            (
                ("POST", "/v1/completions", b'{"prompt": "hi", "max_tokens": 401}'),
                *(400, "bad_request", "max_tokens is 401; 1 to 400"),
            ),
            (
                ("POST", "/v1/completions", b'{"prompt": "hi", "model": "gpt"}'),
                *(404, "not_found", "model: 'gpt' is not served here; 'tiny' is"),
            ),
            (("POST", "/v1/completions", b" " * 1_000_001), 413, "body_too_large", "larger than 1,000,000 bytes"),
            (("GET", "/v1/completions", None), 405, "method_not_allowed", "Method Not Allowed"),
            (("GET", "/v1/chat", None), 404, "not_found", "Not Found"),
        ],
    )
    def test_name_what_is_wrong_as_openai_does(self, ask, request_, status, code, message):
        method, path, content = request_
        response = ask(method, path, content=content)
        assert response.status_code == status
        error = response.json()["error"]
        assert error["code"] == code and message in error["message"] and error["type"] == "invalid_request_error"

    def test_a_body_that_never_ends_is_not_read_to_its_end(self, started, tiny):
        sent = []

        async def endless():
            while True:
                sent.append(len(sent))
                yield b" " * 100_000

        async def send() -> httpx.Response:
            async with client_of(started(tiny), tiny) as client:
                return await client.post("/v1/completions", content=endless())

        assert asyncio.run(send()).status_code == 413 and len(sent) <= 12

    def test_one_request_too_many_is_told_to_come_back(self, started, tiny):
        async def send() -> list[httpx.Response]:
            async with client_of(started(tiny), tiny) as client:
                one = {"prompt": "the inn", "max_tokens": 400}
                return await asyncio.gather(*(client.post("/v1/completions", json=one) for _ in range(4)))

        responses = asyncio.run(send())
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]
        refused = next(response for response in responses if response.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error" and refused.json()["error"]["code"] == "busy"


class TestLoading:
    @pytest.fixture
    def broken(self, tiny, tmp_path) -> Path:
        """One byte of a shard of stage 1 differs."""
        folder = tmp_path / "tiny"
        shutil.copytree(tiny, folder)
        shard = sorted((folder / "1-A").glob("*layer*"))[0]
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
        return folder

    def test_that_fails_is_a_503_with_its_reason(self, started, broken):
        server = started(broken, stage=0)

        async def send() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
            async with client_of(server, broken) as client:
                fields = {"prompt": "the", "stream": True}
                answer = await client.post("/v1/completions", json=fields)
                return answer, await client.get("/health"), await client.get("/stage")

        answer, health, stage = asyncio.run(send())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "loading_failed" and "layer" in answer.json()["error"]["message"]
        assert health.status_code == 503 and health.json()["stage"] == 0 and "layer" in health.json()["error"]
        assert stage.status_code == 200 and stage.json()["replica"] == "the-replica"

    def test_that_dies_after_stage_1_leaves_a_healthy_degraded_service(self, started, tiny):
        server = started(tiny, Link(fail_after_bytes=120_000), stage=1)

        async def send() -> tuple[httpx.Response, httpx.Response]:
            async with client_of(server, tiny) as client:
                while (health := await client.get("/health")).json()["state"] != "degraded":
                    await asyncio.sleep(0.02)
                return health, await client.post("/v1/completions", json={"prompt": "the", "max_tokens": 4})

        health, answer = asyncio.run(send())
        assert health.status_code == 200 and health.json()["stage"] == 1 and "link died" in health.json()["error"]
        assert answer.status_code == 200 and answer.json()["stage"] == 1


def test_models_names_the_one_model(ask):
    body = ask("GET", "/v1/models").json()
    assert body["object"] == "list" and [model["id"] for model in body["data"]] == ["tiny"]


def test_the_page_asks_nobody_else_for_anything(ask):
    response = ask("GET", "/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", response.text)
    assert set(re.findall(r'fetch\("([^"]+)"', response.text)) == {"/stage", "/v1/completions"}
