"""The figures and tables of notebook 44: schedulers under a load that changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.chunked.capacity import STRICT, TIMES
from firsttoken.chunked.experiments.changing_load import ABOVE_BEST, ADAPTIVE
from firsttoken.chunked.experiments.figures import NAMES, dots, told
from firsttoken.chunked.policy_text import place_of
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COURSE = ("prefill_first", "sarathi 512", "shortest_first 512", "adaptive_budget")


def within(result: Result) -> Figure:
    """The share of requests within each objective, by scheduler: draws as small dots, mean and interval."""
    import matplotlib.pyplot as plt

    rows = [row for row in result.rows if row["what"] == "within"]
    schedulers, objectives = _schedulers(result), sorted({row["objective"] for row in rows})
    iteration_s = result.floors["decode_iteration"]["value"]
    size = (2.5 + 2.6 * len(objectives), 0.4 * len(schedulers) + 1.5)
    fig, axes = plt.subplots(1, len(objectives), figsize=size, sharey=True, squeeze=False)
    for ax, times in zip(axes[0], objectives, strict=True):
        for place, name in enumerate(schedulers):
            shares = [100 * r["share"] for r in rows if r["scheduler"] == name and r["objective"] == times]
            dots(ax, place, name, shares, result.summary.of("within_pct", **place_of(name), objective=times))
        ax.set(xlabel="within, % of requests", xlim=(-4, 104))
        ax.set_title(f"gaps ≤ {1e3 * times * iteration_s:.0f} ms", fontsize=11)
    axes[0][0].set_yticks(range(len(schedulers)), [told(name) for name in schedulers])
    axes[0][0].set_ylim(len(schedulers) - 0.5, -0.5)
    return fig


def course(result: Result) -> Figure:
    """Phase by phase, the median first token of who arrived and the P99 of the gaps; bands are the busy phases."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    load = result.parameters["changing_load"]
    rows = [
        row for row in result.rows if row["what"] == "phase" and row.get("objective", TIMES[STRICT]) == TIMES[STRICT]
    ]
    names = [name for name in COURSE if name in _schedulers(result)]
    middles = (np.arange(len(load["factors"])) + 0.5) * load["phase_s"]
    fig, axes = plt.subplots(1, 2, figsize=(11, 4))
    panels = (("ttft_p50_s", 1.0, "median first token, s"), ("tbt_p99_s", 1e3, "P99 between two tokens, ms"))
    for ax, (column, scale, label) in zip(axes, panels, strict=True):
        for phase, factor in enumerate(load["factors"]):
            if factor > 1:
                edges = phase * load["phase_s"], (phase + 1) * load["phase_s"]
                ax.axvspan(*edges, color=COLOURS["other"], alpha=0.35, linewidth=0)
        for name in names:
            look = LOOKS[NAMES[name.partition(" ")[0]][0]]
            mine = [
                [r[column] for r in rows if r["scheduler"] == name and r["phase"] == n] for n in range(len(middles))
            ]
            there = [(at, scale * np.mean(each)) for at, each in zip(middles, mine, strict=True) if each]
            ax.plot(*zip(*there, strict=True), look.marker, ls="-", color=look.colour, label=told(name))
        ax.set(yscale="log", xlabel="time, s", ylabel=label, xlim=(0, load["phase_s"] * len(middles)))
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    tbt_ms = 1e3 * TIMES[STRICT] * result.floors["decode_iteration"]["value"]
    axes[1].axhline(tbt_ms, color=COLOURS["target"], linestyle="--", linewidth=1.5, label="the objective")
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    return fig


def load_rows(result: Result) -> Rows:
    """What clients saw, by scheduler, under the strict objective."""
    found = result.summary
    return [
        {
            "scheduler": told(name),
            "P99 between tokens, ms": interval(scaled(found.of("tbt_p99_s", **where), 1e3), 0),
            "light: P50 TTFT, s": interval(found.of("ttft_p50_s", **where, tenant="light"), 2),
            "light: P99": interval(found.of("ttft_p99_s", **where, tenant="light"), 1),
            "heavy: P50 TTFT, s": interval(found.of("ttft_p50_s", **where, tenant="heavy"), 2),
            "heavy: P99": interval(found.of("ttft_p99_s", **where, tenant="heavy"), 1),
            "late, % of requests": interval(found.of("late_pct", **where), 0),
            "longest wait, s": interval(found.of("longest_wait_s", **where), 1),
        }
        for name, where in ((name, place_of(name)) for name in _schedulers(result))
    ]


def above_rows(result: Result) -> Rows:
    """The adaptive budget's share over the best of fixed budgets and rivals, by objective."""
    iteration_s, found = result.floors["decode_iteration"]["value"], result.summary
    return [
        {
            "gaps of at most, ms": f"{1e3 * times * iteration_s:.0f}",
            "adaptive, % within": interval(found.of("within_pct", scheduler=ADAPTIVE, objective=times), 0),
            "above the best of the others, points": interval(above, 1),
        }
        for times in result.parameters["changing_load"]["objectives"]
        if (above := found.get("within_points", **ABOVE_BEST, objective=times))
    ]


def scaled(entry: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """An entry of a summary in another unit."""
    return entry | {name: scale * entry[name] for name in ("value", "low", "high") if name in entry}


def _schedulers(result: Result) -> list[str]:
    return list(dict.fromkeys(row["scheduler"] for row in result.rows if row["what"] == "run"))
