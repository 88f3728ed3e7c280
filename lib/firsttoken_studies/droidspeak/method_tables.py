"""The tables of notebook 33."""

from __future__ import annotations

import numpy as np

from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken_studies.droidspeak.method_figures import PAPER_GAIN, PAPER_LEAD, PAPER_MEAN_GAIN, PAPER_MEAN_LEAD
from firsttoken_studies.droidspeak.method_summary import ABOVE_BLEND, ACCURACY, DECODED
from firsttoken_studies.droidspeak.methods import CHOOSE, COMPUTE, DROIDSPEAK, JUDGE, LATENCY, OWN
from firsttoken_studies.droidspeak.setting import run_of
from firsttoken_studies.droidspeak.tables import by_run, relative_loss


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
        "group": ("group", DECODED),
        "layers, %": ("group_layers_pct", DECODED),
        "earlier, times": ("speedup_x", DECODED),
        "lost on other items, %": ("relative_loss_pct", {"method": DROIDSPEAK}),
        "by token accuracy": ("group", ACCURACY),
        "its: earlier, times": ("speedup_x", ACCURACY),
        "its: lost, %": ("relative_loss_pct", ACCURACY),
    }
    rows = []
    for run, of in by_run(methods).items():
        found = {title: methods.summary.of(name, **where, **run_of(of[0])) for title, (name, where) in shown.items()}
        rows.append({"run": run} | {title: interval(entry, 2) for title, entry in found.items()})
    return rows


def paper_rows(latency: Result, methods: Result) -> Rows:
    """What the paper says beside what was measured; what is computed has no floor of its own here."""
    gain, lead = f"{PAPER_MEAN_GAIN} ({PAPER_GAIN[0]}-{PAPER_GAIN[1]})", f"{PAPER_LEAD[0]}-{PAPER_LEAD[1]}"
    lead, mean = f"{PAPER_MEAN_LEAD} ({lead})", {"across": "mean"}
    latent, computed = (ABOVE_BLEND | {"case": equal} for equal in (LATENCY, COMPUTE))
    shown = [
        ("speed-up within 5 % of the decoded score, mean", gain, "speedup_x", DECODED | mean, 2, "x"),
        ("the least of it", f"{PAPER_GAIN[0]}", "speedup_x", DECODED | {"across": "least"}, 2, "x"),
        ("speed-up within 5 % of token accuracy, mean", "", "speedup_x", ACCURACY | mean, 2, "x"),
        ("layers recomputed, mean", "34.4 (Figure 11)", "group_layers_pct", DECODED | mean, 1, "% of layers"),
        ("lead over CacheBlend at equal latency, mean", lead, "score_above_points", latent | mean, 1, "points"),
        ("the same at equal computation", "", "score_above_points", computed | mean, 1, "points"),
    ]
    rows = [
        {"what": what, "paper": paper, "measured": interval(methods.summary.get(name, **where), digits), "unit": unit}
        for what, paper, name, where, digits, unit in shown
    ]
    for entry in latency.summary.all("ttft_x", across="worst"):
        what = f"partial prefill, {entry['where']['context_tokens']:,} tokens, its worst size"
        rows.append({"what": what, "measured": interval(entry, 2), "unit": entry["unit"]})
    return rows
