"""The host's time: steps and rows that a request waits for, two numbers fitted to them, and rows that are held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from firsttoken.engine.costs.cost_model import Costs
from firsttoken_studies.nb46_on_the_stated_gpus.host_time import (
    AFTER,
    BEFORE,
    CountedSteps,
    counted,
    fitted,
    host_summary,
)
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import OperatorErrorConfig, ServerRun
from firsttoken_studies.record.results import frame_of

HOST_STEP_S, HOST_ROW_S = 0.003, 0.0004


@dataclass
class Steps(Costs):
    """A step takes what it reads and computes, and what the host needs by step and by row."""

    step: float = 0.0
    row: float = 0.0

    def step_s(self, prefills, contexts):
        rows = len(prefills) + len(contexts)
        work = 0.01 + 1e-5 * sum(new for _, new in prefills) + 1e-7 * sum(contexts)
        return work + self.step + self.row * rows

    def swap_out_s(self, tokens):
        return 0.5

    swap_in_s = swap_out_s


def row_of(clients: int, step: float = 0.0, row: float = 0.0, model: str = "llama-3.1-70b") -> dict:
    run = ServerRun("h100-sxm", model, "bfloat16", 2, 900, 40, clients, 1.0, 1.0)
    return counted(run, CountedSteps(Steps(step, row)), 10_000, OperatorErrorConfig(1, 5, 1024), seed=1)


@pytest.mark.parametrize("clients", [1, 3, 17])
def test_what_is_counted_is_what_the_host_would_add(clients):
    """The schedule of a closed loop does not change with the time of a step, so that the sum is exact."""
    bare, slow = row_of(clients), row_of(clients, HOST_STEP_S, HOST_ROW_S)
    for time in ("ttft", "tpot"):
        added = 1e3 * (HOST_STEP_S * bare[f"{time}_steps"] + HOST_ROW_S * bare[f"{time}_rows"])
        assert slow[f"{time}_ms"] == pytest.approx(bare[f"{time}_ms"] + added, rel=1e-9)
        assert (bare[f"{time}_steps"], bare[f"{time}_rows"]) == (slow[f"{time}_steps"], slow[f"{time}_rows"])


def test_one_client_waits_for_a_step_a_token():
    row = row_of(1)
    assert row["tpot_steps"] == row["tpot_rows"] == pytest.approx(1)


def rows_with(host_ms, names=("a", "b")):
    """Rows of servers that take ``host_ms`` (step, row) by model, beside what the operators say."""
    draw = np.random.default_rng(0)
    rows = []
    for name in names:
        for clients in (1, 4, 16, 64):
            steps, tokens = 1 + draw.random(), clients * (0.8 + 0.2 * draw.random())
            work = 10 + clients / 4
            times = {"tpot_ms": work, "ttft_ms": 5 * work, "tpot_steps": steps, "tpot_rows": tokens}
            times |= {"ttft_steps": 3.0, "ttft_rows": 3.0 * clients}
            step, row = host_ms[name]
            times["vllm_tpot_ms"] = work + step * steps + row * tokens
            times["vllm_ttft_ms"] = 5 * work + step * 3 + row * 3 * clients
            rows.append({"model": name, "card": "h100-sxm", "clients": clients} | times)
    return rows


def test_the_fit_finds_the_two_numbers():
    step, row = fitted(frame_of(rows_with({"a": (2.0, 0.05)}, ("a",))))
    assert (step, row) == (pytest.approx(2.0), pytest.approx(0.05))


def test_a_sum_that_is_too_slow_needs_no_host():
    assert fitted(frame_of(rows_with({"a": (-2.0, 0.0)}, ("a",)))) == (0.0, 0.0)


def test_one_host_explains_all_servers_that_have_it():
    summary = host_summary(rows_with({"a": (2.0, 0.05), "b": (2.0, 0.05)}), {})
    for case in ("fitted on a on h100-sxm", "held out from a on h100-sxm", "held out from a on h100-sxm, Hopper"):
        for time in ("ttft", "tpot"):
            where = {"case": case, "than": "vllm", "across": "median"}
            assert summary.value(f"{time}_off_pct", **where, variant=AFTER) == pytest.approx(0, abs=1e-6)
            assert summary.value(f"{time}_off_pct", **where, variant=BEFORE) > 2
    assert summary.value("host_step_ms", case="b on h100-sxm") == pytest.approx(2)
    assert summary.value("host_row_us", case="b on h100-sxm") == pytest.approx(50)


def test_another_host_makes_held_out_servers_worse():
    summary = host_summary(rows_with({"a": (2.0, 0.05), "b": (0.0, 0.0)}), {})
    where = {"case": "held out from a on h100-sxm", "than": "vllm", "across": "median"}
    before, after = (summary.value("tpot_off_pct", **where, variant=variant) for variant in (BEFORE, AFTER))
    assert before == pytest.approx(0, abs=1e-6) and after > 5


def test_without_others_nothing_is_held_out():
    summary = host_summary(rows_with({"a": (2.0, 0.05)}, ("a",)), {})
    assert not summary.all("tpot_off_pct", case="held out from a on h100-sxm")
