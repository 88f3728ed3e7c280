"""The service with its model in a worker process: answers go on when that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from services import serving, until, workers


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds the worker by /proc")
def test_an_answer_outlives_its_worker(plain: Path) -> None:
    with serving(plain, worker=True) as url:
        (worker,) = workers()
        asked = {"prompt": [5, 6, 7, 8], "max_tokens": 20, "temperature": 0}
        expected = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"]
        os.kill(worker, signal.SIGKILL)
        again = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
        assert again.status_code == 200 and again.json()["choices"] == expected
        assert httpx.get(f"{url}/stage").json()["workers_lost"] == 1
    until(lambda: not workers(), "no worker is left")
