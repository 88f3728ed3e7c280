"""The first second of `firsttoken serve`: it listens, and takes requests, before torch is there.

A process of its own, in which the import of torch waits at a gate: what is seen then does not hang on who is faster.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from plain_tokens import generated
from services import TIMEOUT_S, byte_level, free_port, tiny_model
from waiting import until

from firsttoken.progressiveserve.passlayer import pass_layers

pytestmark = pytest.mark.long(seconds=25)
KEY = "a-key"
MISSING = {1: (1, 2, 3, 4), 2: (3, 4), 3: ()}  # layers of the staged one, by stage
GATED = """
import json, sys, threading, time
from importlib.machinery import PathFinder
from pathlib import Path

place = Path(sys.argv[1])

class Gate:
    # asked about every module that is not there yet
    reached = False

    def find_spec(self, name, path=None, target=None):
        if Gate.reached and threading.current_thread().name != "loading":
            with open(place / "strays", "a") as file:
                print(threading.current_thread().name, name, file=file)
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def held(module):  # and not here, where the one lock of all imports is held
            Gate.reached = True
            (place / "modules.json").write_text(json.dumps(sorted(set(sys.modules) - {'torch'})))
            while not (place / "open").exists():
                time.sleep(0.01)
            if (place / "broken").exists():
                raise ImportError("libtorch.so: cannot open shared object file")
            run(module)

        spec.loader.exec_module = held
        return spec

sys.meta_path.insert(0, Gate())
sys.argv[1:] = sys.argv[2:]
from firsttoken.__main__ import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Gated:
    """A service whose import of torch waits until ``open`` lies in ``place``."""

    process: subprocess.Popen
    place: Path
    url: str

    def open(self) -> None:
        """Let torch be imported."""
        (self.place / "open").touch()

    @property
    def strays(self) -> str:
        """What another thread than the loading one has imported since the gate was reached."""
        file = self.place / "strays"
        return file.read_text() if file.exists() else ""


@contextmanager
def gated(folder: Path, place: Path, *options: str) -> Iterator[Gated]:
    """One that answers already, and stands at the gate."""
    place.mkdir()
    port = free_port()
    (place / "key").write_text(KEY)
    command = [sys.executable, "-c", GATED, str(place), "serve", str(folder), "--port", str(port), *options]
    command += ["--api-key-file", str(place / "key")]
    out = (place / "out").open("w"), (place / "errors").open("w")
    process = subprocess.Popen(command, stdout=out[0], stderr=out[1])
    service = Gated(process, place, f"http://127.0.0.1:{port}")

    def answers() -> bool:
        assert process.poll() is None, (place / "errors").read_text()
        try:
            return httpx.get(f"{service.url}/health").status_code == 503 and (place / "modules.json").exists()
        except httpx.TransportError:
            return False

    try:
        until(answers, "the port answers and the gate is reached")
        yield service
    finally:
        service.open()
        process.kill()
        process.wait()
        for file in out:
            file.close()


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


def test_a_second_end_waits_for_nothing(plain, tmp_path) -> None:
    with gated(plain, tmp_path / "held") as service:
        service.process.send_signal(signal.SIGTERM)
        out = service.place / "out"
        until(lambda: out.read_text().endswith("shutting down\n"), "it has heard")
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(TIMEOUT_S) == -signal.SIGTERM


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
