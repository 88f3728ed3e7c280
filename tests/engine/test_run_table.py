"""A run as one table: what each iteration and each request came to, read back from the file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from firsttoken.engine.request import Sampling
from firsttoken.engine.trace import COLUMNS, write_rows


def test_a_line_an_iteration_and_a_line_a_request(lab, tmp_path: Path) -> None:
    """Toy costs: 1 s a step, 0.01 a prefill token, 0.1 a decode."""
    run = lab.simulated(50)
    run.submit([0] * 10, Sampling(3), 0.0)
    run.submit([0] * 20, Sampling(1), 0.5)
    gone = run.submit([0] * 5, Sampling(9), 100.0)
    run.engine.step()
    run.engine.cancel(gone)
    run.finish()
    write_rows(tmp_path / "rows.csv", run.trace, run.requests)
    with (tmp_path / "rows.csv").open(newline="") as file:
        table = csv.DictReader(file)
        assert tuple(table.fieldnames) == COLUMNS
        rows = list(table)
    steps, requests = ([row for row in rows if row["what"] == what] for what in ("iteration", "request"))
    assert [float(row["at_s"]) for row in steps] == pytest.approx([0.0, 1.1, 2.3, 3.4])
    assert [(row["prefill_tokens"], row["decode_tokens"], row["requests"]) for row in steps] == [
        ("10", "0", "1"),
        ("20", "0", "1"),
        ("0", "1", "1"),
        ("0", "1", "1"),
    ]
    assert steps[0]["ttft_s"] == "" and [row["output_tokens"] for row in requests] == ["3", "1", "0"]
    assert float(requests[0]["ttft_s"]) == pytest.approx(1.1) and float(requests[0]["seconds"]) == pytest.approx(4.5)
    assert float(requests[1]["begun_s"]) == pytest.approx(1.1) and requests[1]["tpot_s"] == ""
    assert (requests[2]["seconds"], requests[2]["begun_s"]) == ("", "")
