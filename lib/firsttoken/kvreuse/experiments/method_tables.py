"""The tables of notebook 33."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.kvreuse.experiments.method_figures import (
    PAPER_GAIN,
    PAPER_LEAD,
    PAPER_MEAN_GAIN,
    PAPER_MEAN_LEAD,
    label_of,
)
from firsttoken.kvreuse.experiments.methods import DROIDSPEAK, REUSE
from firsttoken.kvreuse.experiments.setting import key_of
from firsttoken.kvreuse.experiments.speedups import BOUNDS, TimeShares
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval

if TYPE_CHECKING:
    pass


def method_rows(methods: Result, times: TimeShares) -> Rows:
    """Figure 14 in numbers."""
    rows = []
    for row in methods.rows:
        slug = f"{key_of(row)}_{row['method'].replace(' ', '_').replace('-', '_').lower()}"
        timed = DROIDSPEAK if row["method"] == REUSE else next(n for n in METHODS if row["method"].startswith(n))
        rows.append(
            {
                "run": row["run"],
                "method": label_of(row["method"]) if row["method"] == DROIDSPEAK else row["method"],
                "layers": f"{row['lo']}-{row['hi'] - 1}" if row["hi"] else "",
                "computed, %": round(100 * row["compute"], 1),
                "time / full prefill's": round(float(np.median(times.of(timed, row["compute"]))), 2),
                f"score, % (n = {row['n']})": interval(methods.summary[f"{slug}_pct"]),
                "loss, points": interval(methods.summary.get(f"{slug}_loss_points")),
            }
        )
    return rows


def gain_rows(rows: Rows) -> Rows:
    """The speed-ups in numbers, ``rows`` of ``speedups``; the paper's stand beside them."""
    return [
        {
            "run": row["run"],
            "loses at most": row["bound"],
            "group": f"{row['group']} ({row['layers']} of {row['depth']})",
            "loss, points": interval(row["loss"]),
            "relative, %": round(row["relative_pct"], 1),
            "speed-up": interval(row["gain"], 2),
            "paper": f"{PAPER_GAIN[0]}-{PAPER_GAIN[1]}, mean {PAPER_MEAN_GAIN}",
        }
        for row in rows
    ]


def paper_rows(latency: Result, methods: Result) -> Rows:
    """What the paper says beside what was measured, and the floor of a time."""
    summary = latency.summary
    rows = [
        {
            "what": f"mean speed-up, losing at most {bound}, computation alone",
            "paper": f"{PAPER_MEAN_GAIN} ({PAPER_GAIN[0]}-{PAPER_GAIN[1]})",
            "measured": interval(summary.get(f"speedup_mean_{name}_x"), 2),
            "unit": "x",
        }
        for bound, name in zip(BOUNDS, ("relative", "absolute"), strict=True)
    ]
    leads = [entry["value"] for name, entry in methods.summary.items() if name.endswith("_over_cacheblend_points")]
    if leads:
        span = f"{min(leads):.1f} to {max(leads):.1f}"
        paper = f"{PAPER_MEAN_LEAD} ({PAPER_LEAD[0]}-{PAPER_LEAD[1]})"
        rows.append({"what": "lead over CacheBlend", "paper": paper, "measured": span, "unit": "points"})
    for name, entry in summary.items():
        if name.startswith("partial_over_share_"):
            what = f"partial prefill, {int(name.split('_')[-1]):,} tokens, its worst size"
            rows.append(
                {"what": what, "measured": interval(entry, 2), "floor": 1.0, "unit": "x of (k + first token) / L"}
            )
    return rows
