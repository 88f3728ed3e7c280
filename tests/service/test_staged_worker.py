"""A model in stages in a worker process: it grows there between two steps, whatever becomes of the process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from services import GREEDY, TIMEOUT_S, events, free_port, serving, workers
from waiting import until

pytest.importorskip("zmq")

import httpx

from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.service.launch import running
from firsttoken.service.service_config import ServiceConfig
from firsttoken.study.errors import FirstTokenError, ModelError
from firsttoken_extras.worker.worker_model import best_stage

pytestmark = [
    pytest.mark.long(seconds=60),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds the worker by /proc"),
]
ASKED = {"prompt": [5, 6, 7, 8], "max_tokens": 20, "ignore_eos": True} | GREEDY
SLOW = 0.0003  # Gbit/s: 37 kB a second, so stage 1 takes three seconds and the others two each


def status(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/stage", timeout=TIMEOUT_S).json()


def answer(url: str, **more: Any) -> str:
    told = httpx.post(f"{url}/v1/completions", json=ASKED | more, timeout=TIMEOUT_S)
    assert told.status_code == 200, told.text
    return told.json()["choices"][0]["text"]


def stages_in(response: httpx.Response) -> Iterator[int]:
    """Of each token of a stream, as it comes."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))["stage"]


def reached(url: str, stage: int) -> Callable[[], bool]:
    return lambda: status(url)["stage"] >= stage


@contextmanager
def growing(folder: Path, broken: Callable[[FirstTokenError], None] = print, **settings: Any) -> Iterator[str]:
    with running(ServiceConfig(folder, port=free_port(), worker=True, **settings), broken) as url:
        yield url


@pytest.fixture(scope="module")
def said(tiny: Path) -> str:
    """By all of the model, in one process."""
    with serving(tiny) as url:
        return answer(url)


def test_it_grows_in_the_worker_and_says_so(tiny: Path, said: str) -> None:
    """Each answer has the stage that it began with; one that asks for it moves to the best."""
    with growing(tiny, gbit_per_s=SLOW) as url:
        first = httpx.post(f"{url}/v1/completions", json=ASKED | {"stream": True}, timeout=TIMEOUT_S)
        assert {one["stage"] for one in events(first)} == {1}
        there = status(url)
        assert there["state"] == "recovering" and there["stages"] == 3
        assert 0 < there["bytes_loaded"] < there["bytes_total"]
        moving = ASKED | {"stream": True, "upgrade": True, "max_tokens": 9000}
        seen: list[int] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=moving, timeout=TIMEOUT_S) as response:
            for stage in stages_in(response):
                seen.append(stage)
                if stage == 3:
                    break
        assert seen == sorted(seen) and set(seen) == {1, 2, 3}
        until(lambda: status(url)["state"] == "complete", "the last stage serves")
        assert answer(url) == said
        there = status(url)
        assert there["workers_lost"] == 0 and there["bytes_loaded"] == there["bytes_total"]
        assert [one["stage"] for one in there["events"] if one["what"] == "serving"] == [1, 2, 3]
    until(lambda: not workers(), "no worker is left")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_worker_that_dies_while_it_loads_is_replaced(tiny: Path, said: str, stage: int) -> None:
    """Over a link the next one begins with what had come; an answer that waits, or runs, is the same as ever."""
    with growing(tiny, gbit_per_s=SLOW) as url:
        until(lambda: len(workers()) == 1, "a worker is there")
        until(reached(url, stage - 1), "the stage before serves")
        begun = status(url)["bytes_loaded"]
        until(lambda: status(url)["bytes_loaded"] > begun, "the next stage is on its way")
        (worker,) = workers()
        os.kill(worker, signal.SIGKILL)
        until(lambda: status(url)["workers_lost"] == 1, "the loss is noticed")
        assert answer(url, max_tokens=3)
        until(lambda: status(url)["state"] == "complete", "the last stage serves")
        assert answer(url) == said
        there = status(url)
        assert there["workers_lost"] == 1 and there["error"] is None
        assert [one["stage"] for one in there["events"] if one["what"] == "serving"][-3:] == [1, 2, 3]
    until(lambda: not workers(), "no worker is left")


def test_the_next_one_begins_at_the_best_stage_that_is_here(tiny: Path, said: str, tmp_path: Path) -> None:
    """Without a link that is the last one; with a file of it gone, the one before. Open answers go on with it."""
    shutil.copytree(tiny, folder := tmp_path / "model")
    last = read_manifest(folder).stages[-1].parts[0].file
    with growing(folder) as url:
        until(lambda: status(url)["state"] == "complete", "the last stage serves")
        os.kill(*workers(), signal.SIGKILL)
        assert answer(url) == said
        until(lambda: status(url)["state"] == "complete", "the last stage serves")
        assert [one["stage"] for one in status(url)["events"] if one["what"] == "serving"][-2:] == [3, 3]
        (folder / last).unlink()
        seen: list[int] = []
        asked = ASKED | {"stream": True, "max_tokens": 600}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=TIMEOUT_S) as response:
            for stage in stages_in(response):
                seen.append(stage)
                if len(seen) == 5:
                    os.kill(*workers(), signal.SIGKILL)
        assert set(seen) == {2, 3} and seen == sorted(seen, reverse=True)
        until(lambda: status(url)["state"] == "degraded", "the stage that is not here is said")
        assert "is missing in" in status(url)["error"]
        shutil.copyfile(tiny / last, folder / last)
        until(lambda: status(url)["state"] == "complete", "the last stage serves")
        assert answer(url) == said and status(url)["workers_lost"] == 2


def test_the_best_stage_is_whole_with_all_below(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, folder := tmp_path / "model")
    manifest = read_manifest(folder)
    assert [best_stage(folder, manifest, most) for most in (1, 2, 3)] == [1, 2, 3]
    file = folder / manifest.stages[1].parts[0].file
    file.write_bytes(file.read_bytes()[:-1])
    assert [best_stage(folder, manifest, most) for most in (1, 2, 3)] == [1, 1, 1]


def test_what_no_worker_can_serve_ends_the_service(tiny: Path, tmp_path: Path) -> None:
    """Each in one line, by the worker."""
    shutil.copytree(tiny, folder := tmp_path / "model")
    told: list[FirstTokenError] = []
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 6', '"num_hidden_layers": 5'))
    with growing(folder, told.append) as url:
        until(lambda: bool(told), "it is told")
        assert isinstance(told[0], ModelError) and "config.json" in str(told[0])
        assert status(url)["state"] == "failed"
