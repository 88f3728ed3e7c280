"""The tables of notebook 33."""

from __future__ import annotations

import numpy as np

from firsttoken.kvreuse.experiments.method_figures import PAPER_GAIN, PAPER_LEAD, PAPER_MEAN_GAIN, PAPER_MEAN_LEAD
from firsttoken.kvreuse.experiments.methods import CHOOSE, JUDGE, OWN
from firsttoken.kvreuse.experiments.setting import key_of
from firsttoken.kvreuse.experiments.tables import by_run, relative_loss
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval


def answer_rows(methods: Result, items: str = JUDGE) -> Rows:
    """Figure 14 in numbers, from the items that ``choose`` among groups or from those that ``judge``."""
    rows = []
    for run, of in by_run(methods).items():
        asked = [row for row in of if row["items"] == items]
        own = next(row for row in asked if row["method"] == OWN)
        for row in sorted(asked, key=lambda row: row["compute"]) if items == CHOOSE else asked:
            rows.append(
                {
                    "run": run,
                    "method": row["method"],
                    "layers": f"{row['lo']}-{row['hi'] - 1}" if row["hi"] else "",
                    "computed, %": round(100 * row["compute"], 1),
                    "time / full prefill's": round(float(np.median(row["time_share"])), 2),
                    f"{row['metric']}, % (n = {row['n']})": round(100 * row["score"], 1),
                    "lost, % of the own": ""
                    if row is own
                    else interval(relative_loss(own["item_score"], row["item_score"]).summary()),
                }
            )
    return rows


def choice_rows(methods: Result) -> Rows:
    """The group of each run that decoded answers choose, and the one that token accuracy would choose.

    The former's loss is on the items that judge, the latter's on those that choose.
    """
    shown = {
        "group": "decoded_group",
        "layers, %": "decoded_group_layers_pct",
        "earlier, times": "decoded_speedup_x",
        "lost on other items, %": "droidspeak_relative_loss_pct",
        "by token accuracy": "accuracy_group",
        "its: earlier, times": "accuracy_speedup_x",
        "its: lost, %": "accuracy_group_relative_loss_pct",
    }
    return [
        {"run": run} | {title: interval(methods.summary[f"{key_of(of[0])}_{name}"], 2) for title, name in shown.items()}
        for run, of in by_run(methods).items()
    ]


def paper_rows(latency: Result, methods: Result) -> Rows:
    """What the paper says beside what was measured; what is computed has no floor of its own here."""
    summary = methods.summary | latency.summary
    gain, lead = f"{PAPER_MEAN_GAIN} ({PAPER_GAIN[0]}-{PAPER_GAIN[1]})", f"{PAPER_LEAD[0]}-{PAPER_LEAD[1]}"
    shown = [
        ("speed-up within 5 % of the decoded score, mean", gain, "decoded_speedup_mean_x", 2, "x"),
        ("the least of it", f"{PAPER_GAIN[0]}", "decoded_speedup_least_x", 2, "x"),
        ("speed-up within 5 % of token accuracy, mean", "", "accuracy_speedup_mean_x", 2, "x"),
        ("layers recomputed, mean", "34.4 (Figure 11)", "decoded_group_layers_mean_pct", 1, "% of layers"),
        (
            "lead over CacheBlend at equal latency, mean",
            f"{PAPER_MEAN_LEAD} ({lead})",
            "over_cacheblend_equal_latency_mean_points",
            1,
            "points",
        ),
        ("the same at equal computation", "", "over_cacheblend_equal_compute_mean_points", 1, "points"),
    ]
    rows = [
        {"what": what, "paper": paper, "measured": interval(summary.get(name), digits), "unit": unit}
        for what, paper, name, digits, unit in shown
    ]
    for name, entry in latency.summary.items():
        if name.startswith("partial_over_share_"):
            what = f"partial prefill, {int(name.split('_')[-1]):,} tokens, its worst size"
            rows.append({"what": what, "measured": interval(entry, 2), "unit": entry["unit"]})
    return rows
