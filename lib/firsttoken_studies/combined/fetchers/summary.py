"""What starts with fetchers say: first tokens by link and number of processes, whose they are, and what was moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from firsttoken.study.measures import Summary
from firsttoken.study.record import Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.combined.borrowed.trial import WHOLE
from firsttoken_studies.combined.fetchers.trial import FETCHED
from firsttoken_studies.progressiveserve.coldstart.summary import ratio, values

TTFT, MODEL, SHARE = "ttft_request_s", "model", "T / k"


def parallel_start_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By link TTFT of the whole start and when all its layers were there; by link and number k of processes TTFT, over
    the whole start's and over a k-th of it, when the last process had its part, when the first one had all layers over
    when the whole start had them, and all bytes that came over the links over the model's. Of all of them whose tokens
    came out, and how many lost a process."""
    summary, asked = Summary(), parameters["fetchers"]
    rows = [
        row | {"parts_s": max(filter(None, row["fetched_s"])), "all_s": row["local_s"] or row["loaded_s"]}
        for row in rows
    ]
    for rate in asked["gbit_per_s"]:
        here = [row for row in rows if row["gbit_per_s"] == rate]
        for measure, column in (("ttft_p50_s", TTFT), ("loaded_s", "loaded_s")):
            found = bootstrap(values(here, WHOLE, column), "median").summary("s")
            summary.add(measure, found, variant=WHOLE, gbit_per_s=rate)
        for count in asked["servers"]:
            _fetched(summary, [row for row in here if row["servers"] in (1, count)], count, rate)
    _whose(summary, rows)
    return summary


def _fetched(summary: Summary, rows: Rows, count: int, rate: float) -> None:
    place = {"variant": FETCHED, "servers": count, "gbit_per_s": rate}
    (model,) = {row["bytes_each"][0] for row in rows if row["variant"] == WHOLE}
    moved = [sum(row["bytes_each"]) / model for row in rows if row["variant"] == FETCHED]
    over = ratio(rows, FETCHED, WHOLE, TTFT)
    summary.add("ttft_p50_s", bootstrap(values(rows, FETCHED, TTFT), "median").summary("s"), **place)
    summary.add("ttft_x", over.summary("x"), **place, than=WHOLE)
    summary.add("ttft_x", over.summary("x of T / k", count), **place, than=SHARE)
    summary.add("parts_s", bootstrap(values(rows, FETCHED, "parts_s"), "median").summary("s"), **place)
    summary.add("loaded_x", ratio(rows, FETCHED, WHOLE, "all_s").summary("x"), **place, than=WHOLE)
    summary.add("moved_x", bootstrap(moved, "median").summary("x"), **place, than=MODEL)


def _whose(summary: Summary, rows: Rows) -> None:
    wanted = {tuple(row["tokens"]) for row in rows if row["variant"] == WHOLE}
    fetched = [row for row in rows if row["variant"] == FETCHED]
    same = [100.0 * (tuple(row["tokens"]) in wanted) for row in fetched]
    failed = sum("all layers" not in row["gone"] for row in fetched)
    summary.add("answers", {"value": len(wanted), "unit": "answers of starts of one process"}, variant=WHOLE)
    entry = {"value": float(np.mean(same)), "unit": "% of starts", "n": len(same)}
    summary.add("same_tokens_pct", entry, variant=FETCHED, than=WHOLE)
    summary.add("loans_that_failed", {"value": failed, "unit": "starts"}, variant=FETCHED)
