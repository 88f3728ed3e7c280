"""The first second of `firsttoken serve`: it listens, and takes requests, before torch is there.

A process of its own, in which the import of torch waits at a gate: what is seen then does not hang on who is faster.
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from gated import KEY, gated
from plain_tokens import generated
from services import TIMEOUT_S, byte_level, tiny_model
from waiting import until

from firsttoken.progressiveserve.passlayer import pass_layers

pytestmark = pytest.mark.long(seconds=25)
MISSING = {1: (1, 2, 3, 4), 2: (3, 4), 3: ()}  # layers of the staged one, by stage


@pytest.fixture(params=["tiny", "plain"])
def folder(request: pytest.FixtureRequest) -> Path:
    """A staged checkpoint, and a plain folder."""
    return request.getfixturevalue(request.param)


def test_requests_are_taken_before_torch_is_imported(folder, tmp_path) -> None:
    told = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "the inn", "max_tokens": 8, "temperature": 0}
    with (
        gated(folder, tmp_path / "held", "--max-running", "2", "--max-waiting", "1") as service,
        httpx.Client(base_url=service.url, headers=told, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        there = json.loads((service.place / "modules.json").read_text())
        assert not [name for name in there if name.split(".")[0] in ("torch", "transformers", "peft")]
        health = client.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, "starting")
        chat = {"messages": [{"role": "user", "content": "the inn"}], "max_tokens": 4}
        asked = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(2)]
        asked.append(pool.submit(client.post, "/v1/chat/completions", json=chat))
        until(lambda: client.get("/stage").json()["sessions"] == 3, "all three wait")
        busy = client.post("/v1/completions", json=body)
        assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        assert client.post("/v1/completions", json=body, headers={"Authorization": "Bearer no"}).status_code == 401
        for wrong in ({"prompt": "the", "temperature": -1}, {"prompt": "the", "max_tokens": 10**6}, {"prompt": ""}):
            assert client.post("/v1/completions", json=wrong).status_code == 400, wrong
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.get("/v1/models").json()["data"][0]["id"] == folder.name
        assert client.get("/metrics").status_code == 200
        assert not any(one.done() for one in asked) and service.strays == ""
        service.open()
        answers = [one.result() for one in asked]
        assert [one.status_code for one in answers] == [200] * 3
        said = {(one.json()["stage"], one.json()["choices"][0]["text"]) for one in answers[:2]}
        assert all(text for _, text in said) and (folder.name == "tiny" or len(said) == 1)
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(TIMEOUT_S) == 0
        assert service.strays == "" and (service.place / "errors").read_text() == ""
    for stage, text in said if folder.name == "tiny" else ():  # one that waited has a later stage
        model, ids = tiny_model(), byte_level().encode("the inn").ids
        pass_layers(model, MISSING[stage])
        assert text == byte_level().decode(generated(model, ids, 8, use_cache=False).exact())


def test_an_end_while_torch_is_imported(plain, tmp_path) -> None:
    with gated(plain, tmp_path / "held") as service:
        service.process.send_signal(signal.SIGINT)
        out = service.place / "out"
        until(lambda: out.read_text().endswith("shutting down\n"), "it has heard")
        service.open()
        assert service.process.wait(TIMEOUT_S) == 0
        assert (service.place / "errors").read_text() == ""


def test_a_torch_that_cannot_be_imported_ends_it_in_one_line(plain, tmp_path) -> None:
    body = {"prompt": "the inn", "max_tokens": 8}
    with gated(plain, tmp_path / "held") as service, ThreadPoolExecutor(1) as pool:
        told = {"Authorization": f"Bearer {KEY}"}
        asked = pool.submit(httpx.post, f"{service.url}/v1/completions", json=body, headers=told, timeout=TIMEOUT_S)
        until(lambda: httpx.get(f"{service.url}/stage").json()["sessions"] == 1, "it waits")
        (service.place / "broken").touch()
        service.open()
        answer = asked.result()
        assert answer.status_code == 503 and "libtorch.so" in answer.json()["error"]["message"]
        assert service.process.wait(TIMEOUT_S) == 2
        assert (service.place / "errors").read_text() == (
            "firsttoken: what computes cannot be imported: libtorch.so: cannot open shared object file; "
            "install firsttoken again\n"
        )
