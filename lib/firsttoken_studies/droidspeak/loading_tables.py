"""The tables of notebook 32: sizes, the schedules of Figure 13, and the live run, from arithmetic and results alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from firsttoken.droidspeak.pipeline.schedule import Schedule, simulate
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken_studies.droidspeak.published import FIGURE_13, PUBLISHED_UNITS, SHAPES, edge_over_kv, kv_bytes


def edge_rows(result: Result) -> Rows:
    """E-cache over KV of one layer, by shape; of the model that was run, as it was measured, too."""
    measured = result.summary.get("edge_bytes_x", than="kv of a layer")
    return [
        {
            "model": name,
            "hidden": hidden,
            "KV heads x head dimension": f"{kv_heads} x {head_dim}",
            "E-cache / KV of a layer": edge_over_kv(hidden, kv_heads, head_dim),
            "paper": paper,
            "measured": measured["value"] if measured and "(here)" in name else "",
        }
        for name, (hidden, kv_heads, head_dim, paper) in SHAPES.items()
    ]


def toy_rows() -> Rows:
    """The report's toy example: 1 head of 2, 4 tokens, 2 bytes (errata I36)."""
    return [
        {"layers": layers, "KV, bytes": size, "KV, GB": f"{size / 1e9:.2e}", "report, GB": "1.28e-07"}
        for layers, size in ((layers, kv_bytes(layers, 1, 2, 4)) for layers in (6, 4))
    ]


def schedule_rows() -> Rows:
    """Figure 13: the sums of both requests, as published and under other assumptions, and each request alone."""
    free = tuple(replace(job, edge_units=0) for job in FIGURE_13)
    rows = []
    for schedule, paper in PUBLISHED_UNITS.items():
        timeline = simulate(FIGURE_13, schedule)
        rows.append(
            {"schedule": str(schedule), "paper": paper, "sum": timeline.total}
            | {f"request {job.name}": timeline.ttft[job.name] for job in FIGURE_13}
            | {
                "requests overlap": simulate(FIGURE_13, schedule, overlap=True).total,
                "E-cache free": simulate(free, schedule).total,
                "both": simulate(free, schedule, overlap=True).total,
            }
        )
    return rows


def loading_rows(result: Result) -> Rows:
    """Figure 20 in numbers: median TTFT of every schedule by link, the floor, and what pipelining gains."""
    rows = []
    for rate, of in by_rate(result.rows):
        line: dict[str, Any] = {"link, Gbit/s": f"{rate:g}" if rate else "not shaped"}
        for schedule in Schedule:
            line[f"{schedule}, s"] = f"{median_ttft(of, schedule):.3f}"
        piped = [row for row in of if row["schedule"] == Schedule.PIPELINED]
        line["floor, s"] = f"{np.median([row['floor_s'] for row in piped]):.3f}"
        ratios = [(Schedule.PIPELINED, "floor")]
        ratios += [(other, Schedule.PIPELINED) for other in (Schedule.SEND_REUSED, Schedule.RECOMPUTE)]
        for schedule, than in ratios:
            over = result.summary.of("ttft_x", method=schedule, than=than, gbit_per_s=rate)
            line[f"{schedule} / {than}"] = interval(over, 2)
        rows.append(line)
    return rows


def by_rate(rows: Rows) -> Iterator[tuple[float, Rows]]:
    """The rows of each link, from slow to fast; 0 Gbit/s, a link that is not shaped, comes last."""
    for rate in sorted({row["gbit_per_s"] for row in rows}, key=lambda rate: rate or float("inf")):
        yield rate, [row for row in rows if row["gbit_per_s"] == rate]


def median_ttft(rows: Rows, schedule: Schedule) -> float:
    """Seconds, over the rounds of one link."""
    return float(np.median([row["ttft_s"] for row in rows if row["schedule"] == schedule]))


def loading_comparison(result: Result) -> Rows:
    """Paper, measured and floor: the arithmetic of Figure 13 and 4.1, and the live run at its worst link."""
    value = result.summary.value
    rows: Rows = [
        {
            "what": f"Figure 13, {schedule}, two requests",
            "paper": paper,
            "measured": value("ttft_units", method=schedule, case="figure 13"),
            "floor": sum(job.floor for job in FIGURE_13),
            "unit": "units",
        }
        for schedule, paper in PUBLISHED_UNITS.items()
    ]
    rows += [
        {
            "what": f"E-cache over KV, {name}",
            "paper": paper,
            "measured": value("edge_bytes_x", model=name.lower(), than="kv of a layer"),
            "unit": "x",
        }
        for name, paper in (("Llama-3-8B", 2), ("Llama-3.1-70B", 4))
    ]
    rows += [
        {
            "what": f"KV of the toy example, {layers} layers",
            "paper": 128,
            "measured": value("kv_bytes", model="toy", layers=layers),
            "unit": "B",
        }
        for layers in (4, 6)
    ]
    if worst := result.summary.get("ttft_x", method=Schedule.PIPELINED, than="floor", across="worst"):
        what = "pipelined TTFT over max(transfer, compute), worst link"
        rows.append({"what": what, "measured": worst["value"], "floor": 1.0, "unit": "x"})
    return rows
