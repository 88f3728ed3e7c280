"""The starts before torch as rows: what comes behind the first token."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken_studies.progressiveserve.coldstart.before_torch import start_rows
from firsttoken_studies.progressiveserve.coldstart.summary import cold_start_summary
from firsttoken_studies.progressiveserve.coldstart.variants import VARIANTS
from firsttoken_studies.record.results import Result, load_result


def start(variant: str, round_: int, took: float, **more: Any) -> dict[str, Any]:
    row = {"variant": variant, "round": round_, "link": "unshaped", "gbit_per_s": 0.0, "token_id": 7}
    return row | {"ttft_process_s": took, "ttft_request_s": took / 2, "load_s": 0.1} | more


@pytest.fixture
def result() -> Result:
    """Two rounds of starts in which everything takes as long as it is asked to."""
    rows = []
    for round_ in range(2):
        rows.append(start("read", round_, 0.2, bytes=1000))
        rows.append(start("lean_folder", round_, 1.0))
    machine = {"slug": "x", "cpu": "a CPU", "cores": 2, "gpu": None}
    summary = list(cold_start_summary(rows, {}))
    return Result("before_torch", "quick", {}, machine, {}, "", [0], "2026-01-01", 0.0, {}, rows, {}, summary)


def test_a_row_says_when_the_first_token_came(result):
    (row,) = start_rows(None, result)
    assert row["start"] == VARIANTS["lean_folder"].label and row["the first token, s"].startswith("1.00")
    assert row["the longest gap behind it, s"] == ""


def test_a_record_of_before_there_were_such_starts_is_drawn(result):
    recorded = load_result("before_torch", "full", machine="any")
    assert {row["start"] for row in start_rows(recorded, result)} >= {VARIANTS["torch_behind"].label}
