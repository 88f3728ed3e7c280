"""What is refused before anything is started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from services import free_port, said, serving

from firsttoken.assets.checkpoint import hub_folder
from firsttoken.study.errors import FirstTokenError, StageError
from firsttoken_serve import served_model
from firsttoken_serve.http import launch, ray_replicas
from firsttoken_serve.http.launch import running, serve_forever
from firsttoken_serve.service_config import ServiceConfig


@pytest.fixture
def port() -> int:
    """A free port on loopback."""
    return free_port()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refusal(config: ServiceConfig) -> FirstTokenError:
    with pytest.raises(FirstTokenError) as raised, running(config):
        pass
    return raised.value


@pytest.mark.parametrize(
    "key",
    ["replicas", "max_running", "max_prompt_tokens", "max_new_tokens", "max_choices", "threads", "port", "body_s"],
)
def test_numbers_out_of_range(tmp_path, key):
    with pytest.raises(StageError, match=f"serve: .*{key} must .* not 0$"):
        ServiceConfig(tmp_path, **{key: 0})


def test_the_engine_is_told_its_budget(plain, monkeypatch):
    told = []
    monkeypatch.setattr(served_model, "PlainServer", lambda folder, limits, **_: told.append(limits.engine))
    for asked in ({}, {"token_budget": 96}):
        served_model.serve_model(ServiceConfig(plain, **asked), broken=print)
    assert [engine.token_budget for engine in told] == [512, 96]


@pytest.mark.skipif(os.name == "nt", reason="no signals of POSIX")
def test_an_interrupt_that_a_start_swallows_ends_the_service_all_the_same(plain, monkeypatch, capsys, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs behind ignore SIGINT
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    @contextmanager
    def swallowing(config, broken):
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        yield "http://127.0.0.1:1"

    monkeypatch.setattr(launch, "running", swallowing)
    serve_forever(ServiceConfig(plain, replicas=2))
    assert capsys.readouterr().out.endswith("shutting down\n")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


@pytest.mark.parametrize(
    ("host", "url", "reach"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000", ""),
        ("::1", "http://[::1]:8000", ""),
        ("0:0:0:0:0:0:0:1", "http://[0:0:0:0:0:0:0:1]:8000", ""),
        ("0.0.0.0", "http://0.0.0.0:8000", "every machine that reaches this one"),
        ("::", "http://[::]:8000", "every machine that reaches this one"),
        ("fd00::5", "http://[fd00::5]:8000", "whoever reaches http://[fd00::5]:8000"),
    ],
)
def test_where_it_is_and_who_can_ask_it(plain, monkeypatch, capsys, host, url, reach):
    @contextmanager
    def ended(config, broken):
        broken(None)  # as a signal does
        yield config.url

    monkeypatch.setattr(launch, "running", ended)
    for key in (None, "a-key"):
        serve_forever(ServiceConfig(plain, host=host, api_key=key))
        assert capsys.readouterr() == ("shutting down\n", "")
        launch._announce(ServiceConfig(plain, host=host, api_key=key))
        told = capsys.readouterr()
        assert f"is served at {url};" in told.out and f"curl -N {url}/v1" in told.out
        warned = f"firsttoken: {reach} can ask this service; --api-key-file FILE asks for a key\n"
        assert told.err == (warned if reach and key is None else "")


def test_the_model_is_called_after_its_folder(tiny):
    assert ServiceConfig(tiny).model == ServiceConfig(tiny / "1-A" / "..").model == "tiny"


def test_a_model_by_its_name_on_the_hub(plain, tmp_path, monkeypatch):
    """As `hf download` leaves it: files of a snapshot are links to blobs, and refs/main names the snapshot."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models--org--small-1.5b"
    shutil.copytree(plain, model / "blobs")
    for snapshot in ("0ld", "abc"):
        (model / "snapshots" / snapshot).mkdir(parents=True)
        for file in (model / "blobs").iterdir():
            (model / "snapshots" / snapshot / file.name).symlink_to(file)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0ld")
    assert hub_folder(Path("org/small-1.5b")) == model / "snapshots" / "0ld"
    (model / "refs" / "main").unlink()
    os.utime(model / "snapshots" / "0ld", (0, 0))
    found = hub_folder(Path("org/small-1.5b"))
    assert found == model / "snapshots" / "abc"
    with serving(found) as url:
        assert httpx.get(f"{url}/v1/models/org/small-1.5b").json()["id"] == "org/small-1.5b"
        assert said(url, "the inn", "org/small-1.5b")


@pytest.mark.parametrize("name", ["1-A/*.safetensors", "tokenizer.json"])
def test_a_checkpoint_that_lacks_a_file(tiny, tmp_path, port, name):
    shutil.copytree(tiny, tmp_path / "tiny")
    file = next((tmp_path / "tiny").glob(name))
    file.unlink()
    assert file.name in str(refusal(ServiceConfig(tmp_path / "tiny", port=port)))


def test_a_port_that_is_taken(tiny, taken):
    assert f"127.0.0.1:{taken}" in str(refusal(ServiceConfig(tiny, port=taken)))


def test_a_store_of_prefixes_that_is_none(plain, tmp_path, port):
    (tmp_path / "file").touch()
    for absent in (tmp_path / "absent", tmp_path / "file"):
        error = refusal(ServiceConfig(plain, prefix_store=absent, port=port))
        assert isinstance(error, StageError) and f"there is no folder {absent}" in str(error)


@pytest.mark.parametrize(
    ("module", "replicas", "needed"), [("ray", 2, "ray for replicas"), ("uvicorn", 1, "uvicorn and starlette")]
)
def test_a_package_that_is_not_here(tiny, port, monkeypatch, module, replicas, needed):
    for key in ("RAY_AUTH_TOKEN", *ray_replicas._ENVIRONMENT):
        monkeypatch.setenv(key, "")  # so that what is set meanwhile is taken back
    monkeypatch.setitem(sys.modules, module, None)
    assert str(refusal(ServiceConfig(tiny, replicas=replicas, port=port))) == (
        f'serve needs {needed}: pip install -e ".[serve]" in the clone'
    )


def test_a_ray_that_would_listen_to_the_world(tiny, port, monkeypatch):
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    assert "every interface" in str(refusal(ServiceConfig(tiny, replicas=2, port=port)))


class BusyMachine(types.SimpleNamespace):
    """A ray whose node comes up at the ``late``th time only."""

    def __init__(self, late: int) -> None:
        self.tried, self.ended, self.late = 0, 0, late

    def init(self, **options: object) -> None:
        self.tried += 1
        if self.tried < self.late:
            raise Exception("The current node timed out during startup. This could happen because some of the raylet")

    def shutdown(self) -> None:
        self.ended += 1


def test_a_node_that_is_late_is_started_again():
    ray = BusyMachine(late=3)
    ray_replicas.start_node(ray, 2)
    assert (ray.tried, ray.ended) == (3, 2)
    with pytest.raises(StageError, match=r"^Ray did not start in 3 tries: is this machine very busy\? Try again$"):
        ray_replicas.start_node(BusyMachine(late=4), 2)
