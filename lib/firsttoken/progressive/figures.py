"""The figures of notebooks 11 and 12, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.progressive.distance import resampled_starts
from firsttoken.progressive.stages import REPORT_PLAN
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

KIISE = {
    "s0": {"em": 55.67, "f1": 66.11},
    "s1": {"em": 48.22, "f1": 54.26},
    "s2": {"em": 56.22, "f1": 62.02},
    "s3": {"em": 55.67, "f1": 66.11},
}
"""The authors' stage scores in % (KIISE KSC 2025, Table 1): Llama-2-7B, TriviaQA validation, closed book."""

NAMES = {"none": "not healed", "report": "report's recipe", "ours": "our recipe"}


def distance_map(result: Result) -> Figure:
    """Heat map of the last-token distance over start and block size, the best start of each size framed."""
    import matplotlib.pyplot as plt
    import seaborn

    table = _last(result).pivot(index="size_layers", columns="start_layer", values="distance")
    fig, ax = plt.subplots(figsize=(9, 4.4))
    seaborn.heatmap(table, ax=ax, cmap="viridis", cbar_kws={"label": "angular distance, last token"}, square=False)
    for row, (_, values) in enumerate(table.iterrows()):
        column = int(np.nanargmin(values.to_numpy()))
        ax.add_patch(plt.Rectangle((column, row), 1, 1, fill=False, edgecolor="white", linewidth=2))
    ax.set(xlabel="first layer of the block (0-based)", ylabel="layers in the block")
    ax.tick_params(axis="both", rotation=0)
    ax.grid(False)
    ax.set_title("White frame: the block that turns the residual stream least")
    return fig


def distance_profile(result: Result, size: int) -> Figure:
    """Distance against start for one block size with 95 % intervals, and how often resampling chooses each start."""
    import matplotlib.pyplot as plt

    fig, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2.2, 1))
    frame = result.frame()
    for tokens, line, label in (("last", "o-", "last token"), ("all", "s:", "mean over tokens")):
        part = frame[(frame.size_layers == size) & (frame.tokens == tokens)]
        top.plot(part.start_layer, part.distance, line, color=COLOURS["measured"], label=label)
        top.fill_between(part.start_layer, part.low, part.high, color=COLOURS["measured"], alpha=0.2, linewidth=0)
    depth = int(frame.start_layer.max()) + int(frame.size_layers.min())
    report = REPORT_PLAN.block[0] / REPORT_PLAN.depth * depth
    for ax in (top, bottom):
        ax.axvline(report, color=COLOURS["paper"], linestyle="--", label=f"report's relative depth, {report:.1f}")
    top.set(ylabel=f"angular distance over {size} layers", ylim=(0, None))
    top.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.16))
    chosen = frame[(frame.size_layers == size) & (frame.tokens == "last")].by_passage
    starts = resampled_starts(np.array(chosen.tolist()).T, 1000, seed=0)
    share = np.bincount(starts, minlength=len(chosen)) / len(starts) * 100
    bottom.bar(range(len(chosen)), share, color=COLOURS["measured"])
    bottom.set(xlabel="first layer of the block (0-based)", ylabel="chosen by, %\nof 1,000 resamples", ylim=(0, 105))
    for start in np.flatnonzero(share >= 1):
        bottom.annotate(f"{share[start]:.0f}", (start, share[start]), ha="center", va="bottom", fontsize=9)
    return fig


def chosen_blocks(result: Result) -> Figure:
    """The chosen block of every size as a bar from its first to its last layer; the report's block, scaled, beside."""
    import matplotlib.pyplot as plt

    table = _last(result)
    depth = int(table.start_layer.max()) + int(table.size_layers.min())
    best = table.loc[table.groupby("size_layers").distance.idxmin()]
    fig, ax = plt.subplots(figsize=(8, 4))
    ax.barh(best.size_layers, best.size_layers, left=best.start_layer, color=COLOURS["measured"], label="chosen here")
    scale = depth / REPORT_PLAN.depth
    left, width = REPORT_PLAN.block[0] * scale, len(REPORT_PLAN.block) * scale
    ax.barh([len(REPORT_PLAN.block)], [width], left=[left], height=0.35, color=COLOURS["paper"], edgecolor="black")
    ax.plot([], [], color=COLOURS["paper"], linewidth=7, label=f"report: 20-27 of 32, scaled to {depth}")
    for _, row in best.iterrows():
        ax.annotate(
            f"{row.distance:.2f}", (row.start_layer - 0.3, row.size_layers), ha="right", va="center", fontsize=9
        )
    ax.set(xlabel="layer (0-based)", ylabel="layers in the block", xlim=(-1.5, depth), yticks=best.size_layers)
    ax.set_title("Number: angular distance of the block")
    ax.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.16))
    return fig


def healing_curves(recipes: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Validation F1 and perplexity against sequences read, one line an adapter; ``recipes`` by adapter name.

    Sequences, unlike steps, mean the same for every recipe, and unlike seconds on every machine.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.8))
    for name, recipe in recipes.items():
        stage, _, kind = name.partition("-")
        made = recipe["recipe"]
        step_reads = made["accumulate"] * (made["batch"] + made["text_batch"])
        points = [row for row in recipe["curve"] if "validation_f1" in row]
        read = [row["step"] * step_reads for row in points]
        look = {"color": COLOURS[kind], "linestyle": "-" if stage == "A" else "--"}
        look["marker"] = "o" if stage == "A" else "s"
        label = f"{stage}, {NAMES[kind]}"
        axes[0].plot(read, [100 * row["validation_f1"] for row in points], label=label, **look)
        axes[1].plot(read, [row["validation_perplexity"] for row in points], label=label, **look)
    axes[0].set(xlabel="sequences read", ylabel="validation F1, %", ylim=(0, None), xlim=(0, None))
    axes[1].set(
        xlabel="sequences read",
        ylabel="validation perplexity (log scale)",
        yscale="log",
        xlim=(0, None),
        ylim=(20, 200),
    )
    _log_ticks(axes[1].yaxis)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def stage_scores(result: Result) -> Figure:
    """EM, F1 and perplexity by stage, unhealed and by recipe, with 95 % intervals, and the authors' scores beside."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(11, 4.2))
    for ax, score, label in zip(
        axes, ("em", "f1", "perplexity"), ("exact match, %", "F1, %", "perplexity"), strict=True
    ):
        kinds = [k for k in NAMES if f"{score}_s1_{k}" in result.summary]
        for offset, kind in zip(np.linspace(-0.25, 0.25, len(kinds)), kinds, strict=True):
            for stage in (1, 2):
                _whisker(ax, stage + offset, result.summary[f"{score}_s{stage}_{kind}"], COLOURS[kind], NAMES[kind])
        _whisker(ax, 0, result.summary[f"{score}_s0"], COLOURS["S0"], "full model")
        _whisker(ax, 3, result.summary[f"{score}_s3"], COLOURS["S0"], "full model")
        if score in KIISE["s0"]:
            values = [KIISE[f"s{stage}"][score] for stage in range(4)]
            ax.plot(
                range(4),
                values,
                color=COLOURS["paper"],
                marker="D",
                linestyle=":",
                label="authors: Llama-2-7B, TriviaQA",
                zorder=1,
            )
            ax.set_ylim(0, None)
        else:
            ax.set_yscale("log")
            _log_ticks(ax.yaxis)
        ax.set(xlabel="stage", ylabel=label, xticks=range(4), xticklabels=["full", "1", "2", "3"], xlim=(-0.5, 3.5))
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
    for ax, score, label in zip(axes, ("f1", "perplexity"), ("F1, %", "perplexity (log scale)"), strict=True):
        for place, name in enumerate(labels):
            for kind, shift in (("none", 0.14), ("ours", -0.14)):
                if (entry := result.summary.get(f"{score}_{name}_{kind}")) is not None:
                    _whisker(ax, place - shift, entry, COLOURS[kind], NAMES[kind], horizontal=True)
        _whisker(ax, 0, result.summary[f"{score}_s0"], COLOURS["S0"], "full model", horizontal=True)
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
