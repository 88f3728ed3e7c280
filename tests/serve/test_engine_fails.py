"""A step that meets what nobody foresaw is a fault of the server, wherever the model is: no client asked wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from services import COMPLETIONS, tiny_model
from starlette.testclient import TestClient

from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_server import StaticServer
from firsttoken.engine.request import Sampling, ScheduledChunk
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.study.errors import EngineError, LengthError, RequestError, StageError
from firsttoken_serve.http.app import build_replica
from firsttoken_serve.http.error_responses import error_body
from firsttoken_serve.service_config import ServiceConfig

ERRORS = [RuntimeError("out of memory\nand much more"), RequestError("layers [2, 9) are not"), LengthError("too long")]
ASKED = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """The next step of any executor raises that."""
    execute, coming = LiveExecutor.execute, []

    def executed(self: LiveExecutor, chunks: Sequence[ScheduledChunk]) -> list[int]:
        if coming:
            raise coming.pop()
        return execute(self, chunks)

    monkeypatch.setattr(LiveExecutor, "execute", executed)
    return coming.append


@contextmanager
def replica(folder: Path) -> Iterator[TestClient]:
    served = build_replica(ServiceConfig(folder), "local")
    with TestClient(served, base_url="http://127.0.0.1") as client:
        served.state.begin()
        yield client


def test_over_http_it_is_a_500_and_the_next_is_answered(plain: Path, failing) -> None:
    with replica(plain) as client:
        right = client.post(COMPLETIONS, json=ASKED).json()["choices"]
        for error in ERRORS:
            failing(error)
            said = client.post(COMPLETIONS, json=ASKED)
            assert said.status_code == 500 and said.json()["error"]["type"] == "server_error", said.text
            assert "\n" not in said.json()["error"]["message"]
            failing(error)
            streamed = client.post(COMPLETIONS, json=ASKED | {"stream": True})
            assert streamed.status_code == 500 or '"server_error"' in streamed.text, streamed.text
            assert client.post(COMPLETIONS, json=ASKED).json()["choices"] == right
        counted = client.get("/metrics").text
        assert f'outcome="failed"}} {2 * len(ERRORS)}' in counted, counted


def test_it_is_over_a_swarm_too(failing) -> None:
    executor = LiveExecutor(tiny_model(), 40)
    server = StaticServer(Engine(executor), RequestLimits(), executor.close)
    try:
        for error in ERRORS:
            failing(error)
            with pytest.raises(EngineError, match=f"the engine failed: {error.args[0][:6]}") as met:
                list(server.submit([1, 2, 3], Sampling(4)))
            assert error_body(met.value)[0] == 500
        failing(StageError("layer 3 did not come"))  # what was foreseen is told as it is
        with pytest.raises(StageError):
            list(server.submit([1, 2, 3], Sampling(4)))
        assert len(list(server.submit([1, 2, 3], Sampling(4)))) == 4
    finally:
        server.close()
