"""Notebook 36: what clients see under load, and the requests a second that keep to an objective, from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.engine.experiments.reuse_throughput import FULL, KNEE, OTHER_KNEES, PARTIAL
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = "2 to 4"  # times the throughput (5.3, Figure 15)
SEEN = {"ttft": "TTFT, s", "tbt": "time between tokens, s", "e2e": "E2E, s"}
TICKS = [digit * 10**power for power in range(-3, 4) for digit in (1, 2, 5)]
OBJECTIVES = {"ttft": "mean TTFT", "e2e": "mean E2E"}


def under_load(result: Result) -> Figure:
    """Figure 15: means over requests by rate, a line a way; bands are 95 % over seeds; dashed, the objective."""
    import matplotlib.pyplot as plt

    ran = [row for row in result.rows if row["what"] == "run"]
    ways = list({(row["method"], row["layers"]): None for row in ran})
    depth = max(layers for _, layers in ways)
    fig, axes = plt.subplots(1, 3, figsize=(11.5, 4.4))
    for ax, (what, label) in zip(axes, SEEN.items(), strict=True):
        for at, (method, layers) in enumerate(ways):
            _line(ax, [row for row in ran if (row["method"], row["layers"]) == (method, layers)], what, depth, at)
        if what in OBJECTIVES:
            objective = result.summary.value("objective_ms", metric=what, objective=KNEE) / 1e3
            ax.axhline(objective, color=COLOURS["report"], linestyle="--", label="objective: twice full prefill alone")
        ax.set(xscale="log", yscale="log", xlabel="requests a second, all replicas", ylabel=label)
        for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            axis.set_ticks([tick for tick in TICKS if low <= tick <= high], minor=False)
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    gain = result.summary.get("capacity_x", method=PARTIAL, across="mean", metric="ttft", objective=KNEE, than=FULL)
    here = f"; here {interval(gain, 2)} times" if gain else ""
    seeds, replicas = len({row["seed"] for row in ran}), ran[0]["replicas"]
    told = f"simulated on measured costs, {replicas} replicas, {seeds} seeds. At one TTFT, paper: {PAPER} times{here}"
    fig.suptitle(told, fontsize=10)
    return fig


def _line(ax: Axes, rows: Rows, what: str, depth: int, at: int) -> None:
    look, layers = METHODS[rows[0]["method"]], rows[0]["layers"]
    points = []
    for qps in sorted({row["qps"] for row in rows}):
        means = bootstrap([row[f"{what}_mean_ms"] / 1e3 for row in rows if row["qps"] == qps])
        points.append((qps, means.low, means.estimate, means.high))
    rates, low, middle, high = zip(*points, strict=True)
    named = f"{look.label}, {layers} of {depth} layers" if 0 < layers < depth else look.label
    style = "--" if 0 < layers < depth and at % 2 else "-"
    ax.plot(rates, middle, f"{look.marker}{style}", color=look.colour, markersize=5, label=named)
    ax.fill_between(rates, low, high, color=look.colour, alpha=0.2, linewidth=0)


def throughput_rows(result: Result) -> Rows:
    """By way: the most requests a second within each objective, over full prefill's."""
    rows, depth = [], max(row["layers"] for row in result.rows if row["what"] == "run")
    for entry in result.summary.all("capacity_x", metric="ttft", objective=KNEE):
        where = entry["where"]
        told = f"{where['layers']} of {depth} layers" if where.get("layers") else "mean of the pairs"
        line = {"way": f"{where['method']}, {told}" if where["method"] == PARTIAL else where["method"]}
        for what, label in OBJECTIVES.items():
            for knee in (KNEE, *OTHER_KNEES):
                column = f"{label} within {knee:g} x alone" if knee == KNEE else f"{label}, {knee:g} x"
                gain = result.summary.get("capacity_x", **where | {"metric": what, "objective": knee})
                line[column] = interval(gain, 2)
        rows.append(line | {"paper": PAPER if where["method"] == PARTIAL else ""})
    return rows
