"""The tables of notebooks 15 and 16."""

from __future__ import annotations

from typing import Any

import numpy as np

from firsttoken.progressiveserve.recovery.transitions import TRANSITIONS
from firsttoken.study.record import Result
from firsttoken.study.show import interval
from firsttoken.study.system import NOT_HERE
from firsttoken_studies.progressiveserve.recovery_figures import LABELS, SCORED, answered_s
from firsttoken_studies.progressiveserve.timeline import CASES

Table = list[dict[str, Any]]

_TIMELINE = (
    ("first token, s", "ttft_p50_s", {}, 2, ""),
    ("whole model serves, s", "full_time_s", {}, 2, ""),
    ("tokens handed out", "tokens", {}, 0, ""),
    ("growth of memory at its peak / bytes of the model", "peak_memory_x", {"than": "model"}, 2, NOT_HERE),
    ("requests with a token too few or too many", "short_requests", {}, 0, ""),
    ("stall at a transition beyond a turn and the move, ms", "excess_stall_ms", {}, 1, ""),
)


def timeline_rows(result: Result) -> Table:
    """What each case came to: medians over runs with 95 % intervals; of the first answers, the median over clients and
    runs."""
    rows = [
        {"measure": what}
        | {LABELS[case]: interval(result.summary.get(name, case=case, **to), digits) or absent for case in CASES}
        for what, name, to, digits, absent in _TIMELINE
    ]
    answered = {LABELS[case]: f"{np.median(answered_s(result, case)):.2f}" for case in CASES}
    return [rows[0], {"measure": "whole first answer, s"} | answered, *rows[1:]]


def quality_rows(quality: Result, timeline: Result) -> Table:
    """When each stage serves, in s, and what it answers: EM and F1 in %, perplexity."""
    events = [row for row in timeline.rows if row["case"] == "pinned" and row["row"] == "event"]
    rows: Table = []
    for stage, place in SCORED.items():
        begins = [row["at_s"] for row in events if row["stage"] == stage and row["what"] == "serving"]
        scores = {
            label: interval(quality.summary.of(score, **place))
            for label, score in (("EM, %", "em_pct"), ("F1, %", "f1_pct"), ("perplexity", "perplexity"))
        }
        rows.append({"stage": stage, "serves from, s": f"{np.median(begins):.2f}", **scores})
    return rows


def policy_rows(result: Result) -> Table:
    """Every policy with and without adapters: stall, largest logit error, loss of what follows."""
    found = result.summary
    rows: Table = []
    for kind in ("healed", "bare"):
        for name in TRANSITIONS:
            place = {"policy": name, "variant": kind}
            (cost,) = found.all("cost_ms", **place)
            rows.append(
                {
                    "policy": name,
                    "adapters": "yes" if kind == "healed" else "no",
                    f"stall, {cost['unit']}": interval(cost, 2),
                    "largest logit error": f"{found.value('logit_error', **place):.2g}",
                    "next token right, %": interval(found.of("same_token_pct", **place), 0),
                    "loss of what follows, nats a token": interval(found.get("nll", **place), 2),
                    "more than after a prefill": interval(found.get("excess_nll", **place), 2),
                }
            )
    return rows


def stages_served(result: Result) -> dict[str, str]:
    """What began to serve first and last, by case; on a busy machine a stage between them may arrive with the next one
    and never serve. The last stage of a start is the whole model, whatever its number."""
    events = [row for row in result.rows if row["row"] == "event" and row["what"] in ("loading", "serving")]
    served: dict[str, str] = {}
    for case in CASES:
        last = max(row["stage"] for row in events if row["case"] == case)
        begun = {row["stage"] for row in events if row["case"] == case and row["what"] == "serving"}
        ends = sorted({min(begun), max(begun)})
        served[case] = " to ".join("whole model" if stage == last else f"stage {stage}" for stage in ends)
    return served
