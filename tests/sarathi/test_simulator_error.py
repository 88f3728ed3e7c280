"""Timestamps that another server left, and how a run of the simulator is held against them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firsttoken.simulation.costs.sarathi_artifact import BatchCosts
from firsttoken.study.errors import CorpusError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb42_the_simulator_and_a_gpu import simulator_error
from firsttoken_studies.nb42_the_simulator_and_a_gpu.simulator_error import (
    SPLIT,
    error_summary,
    read_requests,
    two_cards,
    two_cards_summary,
)

GOOD = {"input_toks": 10, "output_toks": 3, "queued_ts": 5.0, "first_token_ts": 5.5, "last_token_ts": 6.5}


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_requests_are_read_in_their_order(tmp_path: Path) -> None:
    late = GOOD | {"queued_ts": 5.2}
    assert [row["queued_ts"] for row in read_requests(written(tmp_path, late, GOOD | {"request_id": "a"}))] == [
        5.0,
        5.2,
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, "{torn"], "line 2: is no request with input_toks"),
        ([{"input_toks": 3}], "line 1: is no request with"),
        (["[1]"], "line 1: is no request with"),
        ([GOOD | {"last_token_ts": 5.4}], "line 1: its times run backwards"),
        ([GOOD | {"queued_ts": -1}], "line 1: its times run backwards"),
        ([GOOD | {"queued_ts": "soon"}], "line 1: is no request"),
        ([""], "holds no request"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_requests(written(tmp_path, *[row for row in rows if row != ""]))


def test_the_error_is_in_per_cent_of_the_real_server() -> None:
    rows = []
    for number, scale in enumerate((1.0, 2.0, 3.0)):
        for run, off in (("vllm", 1.0), ("simulated", 1.1), ("simulated without prefix caching", 1.2)):
            times = {"ttft_s": scale * off, "tpot_s": scale / off, "latency_s": scale}
            rows.append({"request": number, "run": run} | times)
    summary = error_summary(rows, {})
    assert summary.value("ttft_mean_off_pct", source="simulated", than="vllm") == pytest.approx(10)
    assert summary.value("tpot_p99_off_pct", source="simulated", than="vllm") == pytest.approx(100 * (1 / 1.1 - 1))
    assert summary.value("latency_p50_off_pct", source="simulated", than="vllm") == 0
    worst = {entry["where"]["source"]: entry["value"] for entry in summary.all("off_pct", across="worst")}
    assert worst == pytest.approx({"simulated": 10, "simulated without prefix caching": 20})


def test_each_source_serves_what_vllm_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm_requests.jsonl").write_text("\n".join([json.dumps(GOOD)] * 2))
    monkeypatch.setattr(simulator_error, "downloaded", lambda name: tmp_path)
    monkeypatch.setattr(simulator_error, "split_costs", lambda config: (dict.fromkeys(SPLIT, BatchCosts()), 100))
    found = two_cards(load_profile("full"))
    assert [row["run"] for row in found.rows] == [name for name in ("vllm", *SPLIT) for _ in range(2)]
    worst = [two_cards_summary(found.rows, {}).value("off_pct", costs=s, than="vllm", across="worst") for s in SPLIT]
    assert len(set(worst)) == 1, "the same costs are off by the same"
