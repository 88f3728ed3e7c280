"""The figure and the table of notebook 35 about a group for this link, from a result of adaptive_group alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.kvreuse.prefill import Group
from firsttoken.study.measures import Entry
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 1.05  # of the best fixed group


def choices(result: Result) -> Figure:
    """Left: TTFT of every group by bandwidth, and of the choice. Right: the choice over the best fixed group."""
    import matplotlib.pyplot as plt

    fig, (times, over) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=(1.5, 1))
    rates = sorted({row["gbit_per_s"] for row in result.rows})
    fixed = sorted({(row["layers"], row["lo"], row["hi"]) for row in result.rows if row["how"] == "fixed"})
    for index, (layers, lo, hi) in enumerate(fixed):
        whole = lo == 0 and index == len(fixed) - 1
        look = METHODS["full prefill"]
        label = f"always all {layers} layers (full prefill)" if whole else f"always {Group(lo, hi)} ({layers} layers)"
        colour, marker = (look.colour, look.marker) if whole else (COLOURS["other"], "v^D<>"[index % 5])
        line = [_median(result, rate, "fixed", lo, hi) for rate in rates]
        times.plot(rates, line, marker + "-", color=colour, linewidth=1.3, label=label)
    look = METHODS["DroidSpeak"]
    middle = [_median(result, rate, "chosen") for rate in rates]
    times.plot(rates, middle, "o-", color=look.colour, linewidth=2.4, markersize=8, label="chosen for this link")
    for rate, at in zip(rates, middle, strict=True):
        times.annotate(_usual(result, rate), (rate, at), (0, -16), textcoords="offset points", ha="center", fontsize=9)
    times.set(ylabel="time to first token, s", yscale="log")
    bottom, top = times.get_ylim()
    times.set_ylim(bottom / 1.15, top)
    times.set_yticks([tick for tick in (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5) if bottom < tick < top])
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_formatter("")
    for rate in rates:
        entry = _over_best(result, rate)
        over.plot([rate, rate], [entry["low"], entry["high"]], color=look.colour, linewidth=2)
        over.plot(rate, entry["value"], "o", color=look.colour, markersize=8)
    over.axhline(1, color=COLOURS["mark"], linestyle=":", linewidth=1.2, label="best fixed group")
    over.axhline(TARGET, color=COLOURS["target"], linestyle="--", label=f"target: at most {TARGET}")
    over.set_ylabel("TTFT of the choice / of the best fixed group")
    over.set_title(f"medians of {_over_best(result, rates[0])['n']} rounds, 95 %", fontsize=11)
    for ax in (times, over):
        ax.set(xscale="log", xlabel="link, Gbit/s (shaped)")
        ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
        ax.xaxis.set_minor_formatter("")
    handles, labels = ([*a, *b] for a, b in zip(*(ax.get_legend_handles_labels() for ax in (times, over)), strict=True))
    fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return fig


def choice_rows(result: Result) -> Rows:
    """The choice at each link in numbers."""
    rows = []
    for rate in sorted({row["gbit_per_s"] for row in result.rows}):
        groups = {(r["lo"], r["hi"]) for r in result.rows if (r["gbit_per_s"], r["how"]) == (rate, "fixed")}
        fixed = {group: _median(result, rate, "fixed", *group) for group in groups}
        best, chosen = min(fixed, key=fixed.__getitem__), _median(result, rate, "chosen")
        expected = [r["expected_s"] for r in result.rows if (r["gbit_per_s"], r["how"]) == (rate, "chosen")]
        rows.append(
            {
                "link, Gbit/s": f"{rate:g}",
                "chosen": _usual(result, rate),
                "TTFT, s": round(chosen, 3),
                "expected, s": round(float(np.median(expected)), 3),
                "best fixed": str(Group(*best)),
                "its TTFT, s": round(fixed[best], 3),
                "worst fixed, s": round(max(fixed.values()), 3),
                f"choice / best (target {TARGET})": interval(_over_best(result, rate), 3),
            }
        )
    return rows


def _median(result: Result, rate: float, how: str, *ends: int) -> float:
    """Seconds to the first token over one link, of a fixed group [lo, hi) or of the choice."""
    of = [row for row in result.rows if (row["gbit_per_s"], row["how"]) == (rate, how)]
    return float(np.median([row["ttft_s"] for row in of if not ends or (row["lo"], row["hi"]) == ends]))


def _usual(result: Result, rate: float) -> str:
    """The group that is chosen most often over one link."""
    rows = [row for row in result.rows if (row["gbit_per_s"], row["how"]) == (rate, "chosen")]
    groups = [str(Group(row["lo"], row["hi"])) for row in rows]
    return max(sorted(set(groups)), key=groups.count)


def _over_best(result: Result, rate: float) -> Entry:
    return result.summary.of("ttft_x", variant="chosen", than="best fixed", gbit_per_s=rate)
