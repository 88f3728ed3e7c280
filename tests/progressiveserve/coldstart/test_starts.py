"""The starts before torch as rows: what is paid beforehand, what was not tried, and the lanes of vLLM's roadmap."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.study.record import Result, load_result
from firsttoken_studies.progressiveserve.coldstart import before_torch
from firsttoken_studies.progressiveserve.coldstart.before_torch import LANES, lane_rows, start_rows
from firsttoken_studies.progressiveserve.coldstart.summary import cold_start_summary
from firsttoken_studies.progressiveserve.coldstart.variants import VARIANTS

REASON = "criu is not installed; apt-get install criu"


def start(variant: str, round_: int, took: float, **more: Any) -> dict[str, Any]:
    row = {"variant": variant, "round": round_, "link": "unshaped", "gbit_per_s": 0.0, "token_id": 7}
    return row | {"ttft_process_s": took, "ttft_request_s": took / 2, "load_s": 0.1} | more


@pytest.fixture
def result() -> Result:
    """Two rounds of starts in which everything takes as long as it is asked to, without CRIU."""
    rows = []
    for round_ in range(2):
        rows.append(start("read", round_, 0.2, bytes=1000))
        rows.append(start("lean_folder", round_, 1.0, phase_interpreter_s=0.1, phase_imports_s=0.6))
        rows.append(start("copied_first", round_, 0.25, paid_s=2.0, kept_bytes=3e8, phase_interpreter_s=0.02))
    machine, told = {"slug": "x", "cpu": "a CPU", "cores": 2, "gpu": None}, {"left_out": {"restored": REASON}}
    summary = list(cold_start_summary(rows, {}))
    return Result("before_torch", "quick", {}, machine, told, "", [0], "2026-01-01", 0.0, {}, rows, {}, summary)


def test_a_row_says_what_is_paid_before_or_why_it_was_not_tried(result):
    rows = {row["start"]: row for row in start_rows(None, result)}
    copied = rows[VARIANTS["copied_first"].label]
    assert copied["the first token, s"].startswith("0.25") and copied["paid before, s"].startswith("2.00")
    assert copied["kept, MB"].startswith("300") and copied["the longest gap behind it, s"] == ""
    assert rows[VARIANTS["lean_folder"].label]["paid before, s"] == ""
    assert rows[VARIANTS["restored"].label]["not tried"] == REASON
    assert VARIANTS["torch_behind"].label not in rows


def test_each_lane_has_a_line_and_each_start_its_phases(result):
    rows = list(lane_rows(result))
    assert [row["lane"][0] for row in rows] == ["1", "2", "3", "4", "4", "5", "6"]
    read, boot, copied = (row for row in rows if "start" in row)
    assert read["weights, s"] == "0.10" and read["start"] == "reading alone"
    assert (boot["framework bootstrap, s"], boot["tokenizer, s"], boot["all, s"]) == ("0.70", "", "1.00")
    assert (copied["framework bootstrap, s"], copied["all, s"]) == ("0.02", "0.25")
    named = {name for *_, names in LANES for name in names} - {"read"}
    assert named == {*before_torch.STARTS, *before_torch.SERVED, *before_torch.COPIED, before_torch.RESTORED}


def test_a_record_of_before_there_were_such_starts_is_drawn(result):
    recorded = load_result("before_torch", "full", machine="any")
    assert {row["start"] for row in start_rows(recorded, result)} >= {VARIANTS["torch_behind"].label}
    assert len(list(lane_rows(recorded))) >= len(LANES)


@pytest.mark.parametrize("reason", ["criu is not installed", ""])
def test_a_process_that_cannot_be_restored_is_left_out_with_the_reason(monkeypatch, reason):
    """CRIU may find all that it needs and still fail with this process."""
    monkeypatch.setattr(before_torch, "no_snapshots", lambda: reason)

    def failing(*_: Any) -> None:
        raise before_torch.FirstTokenError("the cold start restored failed: criu dump failed: no luck")

    monkeypatch.setattr(before_torch, "one_trial", failing)
    told = before_torch._not_restored(None)
    assert told == (reason or "the cold start restored failed: criu dump failed: no luck")
