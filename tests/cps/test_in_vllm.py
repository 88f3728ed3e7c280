"""Victim rules inside vLLM: what its process answers becomes rows; what it does not is one line."""

from __future__ import annotations

import json

import pytest
from interpreters import answering

from firsttoken.study.errors import FirstTokenError
from firsttoken_studies.nb24_who_is_preempted import in_vllm


def test_what_vllm_answers_is_read_line_by_line(tmp_path, monkeypatch) -> None:
    report = {"times_s": [[1.0, 1.5, 3.5], [2.0]], "preemptions": 3}
    monkeypatch.setattr(
        in_vllm,
        "VLLM_PYTHON",
        answering(tmp_path, f"print('INFO', 1)\nprint('{json.dumps({'vllm': '1'})}')\nprint('{json.dumps(report)}')"),
    )
    assert in_vllm.answered({}, tmp_path, 2) == [{"vllm": "1"}, report]
    assert in_vllm.seen(report) == {
        "p99_tpot_ms": 1250.0,
        "mean_ttft_ms": 1500.0,
        "p99_ttft_ms": pytest.approx(1990.0),
        "in_time_pct": 50.0,
        "longest_gap_s": 2.0,
        "starved": 0.0,
        "preemptions": 3.0,
    }


@pytest.mark.parametrize("ending", ["import sys; sys.exit(1)", "pass"])
def test_a_vllm_that_fails_says_why(tmp_path, monkeypatch, ending) -> None:
    monkeypatch.setattr(
        in_vllm,
        "VLLM_PYTHON",
        answering(tmp_path, f"import sys\nprint('x\\nValueError: no memory\\nLoading: 0%', file=sys.stderr)\n{ending}"),
    )
    with pytest.raises(FirstTokenError, match="league_vllm: vLLM failed: ValueError: no memory"):
        in_vllm.answered({}, tmp_path, 2)


def test_without_vllm_its_set_up_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(in_vllm, "VLLM_PYTHON", tmp_path / "python")
    with pytest.raises(FirstTokenError, match=r"run env/vllm/setup\.sh"):
        in_vllm.answered({}, tmp_path, 2)
