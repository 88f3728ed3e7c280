"""What a system cannot tell or do is said in tables and figures, and stops nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from firsttoken.study.system import NOT_HERE
from firsttoken_studies.nb15_recovery_timeline.study import CASES, timeline_summary
from firsttoken_studies.progressiveserve import recovery_figures as recovery_figures
from firsttoken_studies.progressiveserve import recovery_figures as recovery_tables
from firsttoken_studies.progressiveserve.coldstart import figures
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, KERNEL, NONE, TrialLink, files_were
from firsttoken_studies.progressiveserve.coldstart.summary import cold_start_summary

PHASES = ("interpreter", "imports", "config_and_tokenizer", "load", "prefill")


def trial(variant: str, wire: TrialLink, **more: Any) -> dict[str, Any]:
    times = dict.fromkeys(("ttft_request_s", "ttft_process_s", "load_s", "prefill_warm_s", "cpu_s"), 1.0)
    told = {"link": wire.name, "gbit_per_s": wire.gbit_per_s, "shaped_by": wire.shaped_by, "cold": wire.cold}
    row = {"variant": variant, "round": 0, "bytes": 1000, "growth_bytes": None, "resident_before_pct": None}
    if variant == "progressive":
        row |= {"stage2_s": 0.1, "stage3_s": 0.1, "cpu_full_s": 1.5, "full_bytes": 1000}
    return row | times | told | {f"phase_{name}_s": 0.2 for name in PHASES} | more


@pytest.fixture
def result() -> SimpleNamespace:
    """A user without root on macOS: no limit in the kernel, nothing verified, memory unknown."""
    wires = (TrialLink(1.0, BUCKET), TrialLink(16.0, BUCKET, cold=False))
    rows = [trial(name, wire) for wire in wires for name in ("read", "whole_streamed", "progressive")]
    refused = "no limit in the kernel: it needs root"
    provenance = {"left_out": {"1 Gbit/s": ["from_pretrained", "runai"]}, "no_kernel_limit": refused}
    floors = {f"link {wire.name}": {"value": 1.0, "unit": "s", "why": "made up"} for wire in wires}
    summary = cold_start_summary(rows, {})
    return SimpleNamespace(
        rows=rows, summary=summary, provenance=provenance, floors=floors, profile="quick", slug="x", with_mechanism=None
    )


def test_a_link_says_that_files_were_not_verified(result: SimpleNamespace) -> None:
    assert [files_were(row) for row in result.rows[::3]] == ["cold, not verified", "in memory, not verified"]


@pytest.mark.parametrize(("resident", "cold", "said"), [(0.0, True, "cold"), (100.0, True, "in memory")])
def test_what_was_verified_counts_not_what_was_asked(resident: float, cold: bool, said: str) -> None:
    assert files_were({"resident_before_pct": resident, "cold": cold}) == said


def test_an_unknown_memory_gives_no_measure(result: SimpleNamespace) -> None:
    assert not [entry for entry in result.summary if "memory" in entry["measure"]]
    assert {row["ratio"] for row in figures.target_rows(None, result)} >= {"peak memory / whole start's"}


def test_the_figures_are_drawn_all_the_same(result: SimpleNamespace) -> None:
    fig = figures.phase_stacks(None, result)
    assert fig.axes[0].get_title() == "1 Gbit/s, shaped by a token bucket"
    assert fig.axes[0].get_yticklabels()[0].get_text() == "ours, progressive"
    assert figures._link_title([trial("whole", TrialLink(0.0, NONE))]) == "this disk, cold, not verified"
    assert figures._link_title([trial("whole", TrialLink(1.0, KERNEL))]) == "1 Gbit/s, shaped in the kernel"


def test_a_stack_ends_at_the_number_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases of one start trade off against each other, so that their medians do not add up to the median start."""
    times = [(1.4, 0.15, 0.1), (0.5, 0.6, 0.55), (1.3, 0.2, 0.2)]
    rows = [
        trial("whole", TrialLink(1.0, KERNEL), round=i)
        | {"phase_load_s": load, "phase_config_and_tokenizer_s": tokenizer, "phase_prefill_s": prefill}
        | {"ttft_process_s": 0.4 + load + tokenizer + prefill}
        for i, (load, tokenizer, prefill) in enumerate(times)
    ]
    read = trial("read", TrialLink(1.0, KERNEL))
    found = cold_start_summary([*rows, read], {})
    floors = {"link 1 Gbit/s": {"value": 1.0}}
    told = {
        "rows": [read, *rows],
        "summary": found,
        "provenance": {},
        "floors": floors,
        "profile": "quick",
        "slug": "x",
        "with_mechanism": None,
    }
    monkeypatch.setattr(figures, "STACKED", ("whole",))
    fig = figures.phase_stacks(None, SimpleNamespace(**told))
    end = max(bar.get_x() + bar.get_width() for bar in fig.axes[0].patches)
    assert end == pytest.approx(found.value("process_ttft_p50_s", variant="whole", link="1gbit"))


@pytest.mark.parametrize(("before", "peak", "shown"), [(None, None, NOT_HERE), (100, 1600, "1.50 [1.50, 1.50]")])
def test_a_timeline_whose_memory_is_unknown(before, peak, shown) -> None:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        told = {"case": case, "run": 0}
        rows += [told | {"row": "memory", "at_s": 0.1 * i, "rss_bytes": before} for i in range(3)]
        rows += [told | {"row": "token", "client": 0, "request": 0, "at_s": 1.0 + i, "stage": 1} for i in range(2)]
        rows += [told | {"row": "request", "client": 0, "request": 0, "at_s": 0.0, "tokens": 2}]
        rows += [told | {"row": "event", "what": "serving", "stage": 1, "at_s": 1.0}]
        rows += [told | {"row": "peak", "rss_bytes": peak, "model_bytes": 1000}]
    summary = timeline_summary(rows, {"timeline": {"runs": 1, "new_tokens": 2}})
    result = SimpleNamespace(rows=rows, summary=summary, profile="quick", slug="x", with_mechanism=None)
    (memory,) = [row for row in recovery_tables.timeline_rows(result) if row["measure"].startswith("growth of memory")]
    assert {memory[label] for label in recovery_figures.LABELS.values()} == {shown}
    fig = recovery_figures.growth_of_service(None, result)
    assert [text.get_text() for ax in fig.axes for text in ax.texts] == [NOT_HERE] * (3 if before is None else 0)
