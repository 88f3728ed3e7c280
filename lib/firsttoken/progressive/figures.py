"""The figures of notebooks 11 and 12, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.progressive.stages import REPORT_PLAN
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

NAMES = {"none": "not healed", "report": "report's recipe", "ours": "our recipe"}


def distance_map(result: Result) -> Figure:
    """Heat map of the last-token distance over start and block size: the best start of each size framed, and the block
    of the deployed size beside the report's at its relative depth."""
    import matplotlib.pyplot as plt
    import seaborn

    table = _last(result).pivot(index="size_layers", columns="start_layer", values="distance")
    fig, ax = plt.subplots(figsize=(9, 4.6))
    seaborn.heatmap(table, ax=ax, cmap="Greys", cbar_kws={"label": "angular distance, last token"}, square=False)
    size = len(REPORT_PLAN.block)
    for row, (layers, values) in enumerate(table.iterrows()):
        column, here = int(np.nanargmin(values.to_numpy())), layers == size
        frame = {"edgecolor": COLOURS["measured"], "linewidth": 4 if here else 2}
        ax.add_patch(plt.Rectangle((column, row), 1, 1, fill=False, clip_on=False, **frame))
        if here:
            scaled = REPORT_PLAN.block[0] / REPORT_PLAN.depth * table.shape[1]
            ax.plot(
                scaled + 0.5,
                row + 0.5,
                "D",
                color=COLOURS["paper"],
                markersize=12,
                markeredgecolor="white",
                markeredgewidth=2,
            )
    ax.plot([], [], "s", color=COLOURS["measured"], fillstyle="none", label="turns the residual stream least, by size")
    ax.plot(
        [],
        [],
        "D",
        color=COLOURS["paper"],
        markeredgecolor="black",
        label=f"the report's block of {size}, at its relative depth",
    )
    ax.set(xlabel="first layer of the block (0-based)", ylabel="layers in the block")
    ax.tick_params(axis="both", rotation=0)
    ax.grid(False)
    ax.set_title(f"thick: the block of {size} that is left out here", fontsize=11)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
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
