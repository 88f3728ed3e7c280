"""The figures of notebooks 11 and 12, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.progressive.stages import REPORT_PLAN
from firsttoken.study.overlay import over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

KIISE = {"em_pct": (55.67, 48.22, 56.22, 55.67), "f1_pct": (66.11, 54.26, 62.02, 66.11)}
"""The authors' scores of the full model and of stages 1 to 3 in % (KIISE KSC 2025, Table 1): Llama-2-7B, TriviaQA
validation, closed book."""

DEEP = 0.5  # a block is deep that begins in the second half of the layers
NAMES = {"none": "not healed", "report": "report's recipe", "ours": "our recipe"}


def distance_map(recorded: Result | None, now: Result) -> Figure:
    """Heat map of the reader's last-token distances over start and block size: the best start of each size framed, pale
    where the record has it, and the block of the deployed size beside the report's at its relative depth."""
    import matplotlib.pyplot as plt
    import seaborn

    drawn = over(recorded, now)
    table = _last(now).pivot(index="size_layers", columns="start_layer", values="distance")
    fig, ax = plt.subplots(figsize=(9, 4.9))
    seaborn.heatmap(table, ax=ax, cmap="Greys", cbar_kws={"label": "angular distance (0 to 1), last token"})
    rows = {size: row for row, size in enumerate(table.index)}
    for one in drawn:
        width, colour = (2, COLOURS["measured"]) if one.own else (6, COLOURS["single"])
        for start, size in _best(one.result)[["start_layer", "size_layers"]].itertuples(index=False):
            if size in rows:
                frame = plt.Rectangle((start, rows[size]), 1, 1, fill=False, clip_on=False)
                ax.add_patch(frame)
                frame.set(edgecolor=colour, linewidth=width, zorder=one.style["zorder"])
        label = f"turns the stream least, by size: {one.who()}"
        ax.plot([], [], "s", color=colour, fillstyle="none", markeredgewidth=width / 1.5, markersize=8, label=label)
    size = len(REPORT_PLAN.block)
    if size in rows:
        scaled = REPORT_PLAN.block[0] / REPORT_PLAN.depth * table.shape[1]
        look = {"color": COLOURS["paper"], "markeredgecolor": "black", "markeredgewidth": 1.5}
        label = f"the report's block of {size}, at its relative depth"
        ax.plot(scaled + 0.5, rows[size] + 0.5, "D", markersize=11, linestyle="none", label=label, **look)
    ax.set(xlabel="first layer of the block (0-based)", ylabel="layers in the block")
    ax.tick_params(axis="both", rotation=0)
    ax.grid(False)
    start, end = now.summary.value("chosen_start"), now.summary.value("chosen_end")
    where = "deep, as the report has it" if now.summary.value("relative_depth") >= DEEP else "in the middle, not deep"
    fig.suptitle(f"The block of {end - start + 1} that turns the stream least, {start}-{end}, lies {where}")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return fig


def chosen_blocks(recorded: Result | None, now: Result) -> Figure:
    """The chosen block of every size as a bar from its first to its last layer; the report's block, scaled, beside."""
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    fig, ax = plt.subplots(figsize=(8, 4.6))
    for one in drawn:
        best = _best(one.result)
        places, height = best.size_layers - one.shift, 0.7 if one.alone else 0.34
        look = one.style | {"color": COLOURS["measured"], "edgecolor": "black" if one.own else "none"}
        ax.barh(places, best.size_layers, left=best.start_layer, height=height, label=f"chosen: {one.who()}", **look)
    depth = _depth(now)
    for start, size, distance in best[["start_layer", "size_layers", "distance"]].itertuples(index=False):
        ax.annotate(f"{distance:.2f}", (start - 0.3, size), ha="right", va="center", fontsize=9)
    scale, size = depth / REPORT_PLAN.depth, len(REPORT_PLAN.block)
    left, width = REPORT_PLAN.block[0] * scale, size * scale
    told = f"report: {REPORT_PLAN.block[0]}-{REPORT_PLAN.block[-1]} of {REPORT_PLAN.depth}, scaled to {depth}"
    ax.barh([size], [width], left=[left], height=0.35, color=COLOURS["paper"], edgecolor="black", label=told)
    ax.set(xlabel="layer (0-based); beside a bar: the block's angular distance", ylabel="layers in the block")
    ax.set(xlim=(-1.5, depth), yticks=sorted(best.size_layers))
    deep = int((best.start_layer / depth >= DEEP).sum())
    fig.suptitle(f"{deep} of {len(best)} chosen blocks begin in the deeper half, where the report's lies")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return fig


def stage_scores(result: Result) -> Figure:
    """EM, F1 and perplexity by stage, unhealed and by recipe, with 95 % intervals, and the authors' scores beside."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(11, 4.2))
    found = result.summary
    labels = {"em_pct": "exact match, %", "f1_pct": "F1, %", "perplexity": "perplexity"}
    for ax, (score, label) in zip(axes, labels.items(), strict=True):
        kinds = [k for k in NAMES if found.get(score, stage=1, recipe=k)]
        for offset, kind in zip(np.linspace(-0.25, 0.25, len(kinds)), kinds, strict=True):
            for stage in (1, 2):
                _whisker(ax, stage + offset, found.of(score, stage=stage, recipe=kind), COLOURS[kind], NAMES[kind])
        for stage in (0, 3):
            _whisker(ax, stage, found.of(score, stage=stage), COLOURS["S0"], "full model")
        if score in KIISE:
            ax.plot(
                range(4),
                KIISE[score],
                color=COLOURS["paper"],
                marker="d",
                linestyle=":",
                label="authors: Llama-2-7B, TriviaQA",
                zorder=1,
            )
            ax.set_ylim(0, None)
        else:
            ax.set_yscale("log")
            _log_ticks(ax.yaxis)
        ax.set(xlabel="stage", ylabel=label, xticks=range(4), xticklabels=["full", "1", "2", "3"], xlim=(-0.5, 3.5))
    questions, windows = (found.of(score, stage=0)["n"] for score in ("f1_pct", "perplexity"))
    axes[1].set_title(f"{questions} questions, {windows} windows; bars: 95 %", fontsize=11)
    handles = dict(zip(*reversed(axes[1].get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5)
    return fig


def control_scores(result: Result) -> Figure:
    """F1 and perplexity of every control, healed and not, with 95 % intervals."""
    import matplotlib.pyplot as plt

    labels = {
        "s0": "full model",
        "full": "full model, trained on",
        "chosen": "8 layers, chosen block",
        "one_shot": "  the same, twice the steps",
        "random": "8 layers, random block",
        "drop6": "6 layers, chosen block",
        "drop4": "4 layers, chosen block",
    }
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for ax, score, label in zip(axes, ("f1_pct", "perplexity"), ("F1, %", "perplexity (log scale)"), strict=True):
        for place, name in enumerate(labels):
            for kind, shift in (("none", 0.14), ("ours", -0.14)):
                if (entry := result.summary.get(score, variant=name, recipe=kind)) is not None:
                    _whisker(ax, place - shift, entry, COLOURS[kind], NAMES[kind], horizontal=True)
        _whisker(ax, 0, result.summary.of(score, stage=0), COLOURS["S0"], "full model", horizontal=True)
        ax.set(xlabel=label, yticks=range(len(labels)), yticklabels=labels.values())
    axes[0].set_xlim(0, None)
    axes[0].invert_yaxis()
    axes[1].set_xscale("log")
    _log_ticks(axes[1].xaxis)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3)
    return fig


def _whisker(
    ax: Axes, place: float, entry: Mapping[str, Any], colour: str, label: str, horizontal: bool = False
) -> None:
    """One estimate with its interval, as a dot and a bar."""
    reach = [[entry["value"] - entry["low"]], [entry["high"] - entry["value"]]]
    x, y = (entry["value"], place) if horizontal else (place, entry["value"])
    ax.errorbar(
        [x],
        [y],
        **{"xerr" if horizontal else "yerr": reach},
        fmt="o",
        color=colour,
        label=label,
        capsize=3,
        markersize=7,
    )


def _log_ticks(axis: Axis) -> None:
    """Labels at 1, 2 and 5 of each decade, as whole numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:.0f}")


def _last(result: Result) -> pandas.DataFrame:
    frame = result.frame()
    return frame[frame.tokens == "last"]


def _best(result: Result) -> pandas.DataFrame:
    """The row of each block size whose distance is the least."""
    table = _last(result)
    return table.loc[table.groupby("size_layers").distance.idxmin()]


def _depth(result: Result) -> int:
    table = _last(result)
    return int((table.start_layer + table.size_layers).max())
