"""``serve --preemption cross_point`` has this machine's costs: measured at its first start, and read at the next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from services import TIMEOUT_S, serving

from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken_serve.served_model import serve_model
from firsttoken_serve.service_config import ServiceConfig

SQUEEZED = {"kv_blocks": 8, "max_running": 8, "max_model_len": 100}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "recovery-costs"


def answers(folder: Path, **settings) -> list[str]:
    """What six requests are told that have not all room at once."""
    with serving(folder, **SQUEEZED, **settings) as url, ThreadPoolExecutor(6) as clients:

        def ask(first: int) -> str:
            body = {"prompt": [first, *range(10, 40)], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        return list(clients.map(ask, range(6)))


def test_the_first_start_measures_and_the_next_reads(plain, cache, capsys) -> None:
    expected = answers(plain)
    assert not cache.exists()
    capsys.readouterr()
    assert answers(plain, preemption="cross_point") == expected
    told = capsys.readouterr().err
    assert told.count("firsttoken: cross_point: ") == 1 and "measured here on" in told
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    assert answers(plain, preemption="cross_point") == expected
    assert capsys.readouterr().err.splitlines()[-1] in told and file.stat().st_mtime_ns == before
    assert answers(plain, preemption="cross_point", measure_again=True) == expected
    assert file.stat().st_mtime_ns > before


def test_a_model_in_stages_has_what_is_kept_of_its_shape(tiny, plain, cache, capsys) -> None:
    expected = answers(tiny)
    assert answers(tiny, preemption="cross_point") == expected
    assert "learnt while serving" in capsys.readouterr().err and not cache.exists()
    answers(plain, preemption="cross_point")
    capsys.readouterr()
    assert answers(tiny, preemption="cross_point") == expected
    assert "measured here on" in capsys.readouterr().err and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("name", ["cross_point", "online"])
def test_no_threshold_of_another_machine_serves(plain, name: str) -> None:
    policy = serve_model(ServiceConfig(plain, preemption=name), lambda error: None).limits.preemption
    assert policy.start == 0 and policy.choose(16, 0.0) is not None
    assert {policy.choose(1, float(now)) for now in range(3, 60)} <= set(Action)


def test_measuring_again_is_of_the_cross_point() -> None:
    with pytest.raises(StageError, match="--measure-again is for --preemption cross_point; add that, or leave it out"):
        ServiceConfig(Path("model"), measure_again=True)
