"""The figures of notebook 31, drawn from results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.kvreuse.experiments import tables
from firsttoken.kvreuse.experiments.figures import RECOMPUTED, REUSED
from firsttoken.kvreuse.experiments.profiling import BOUND, profiled_groups
from firsttoken.kvreuse.experiments.published import FIGURE_10_CRITICAL, FIGURE_10_GROUP, FIGURE_11_LAYERS, PAPER_DEPTH
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.kvreuse.profile.pareto import frontier, smallest_within
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result
from firsttoken.study.stats import bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def transitions(result: Result) -> Figure:
    """Figure 10: the error by the number of contiguous runs that equally many recomputed layers lie in."""
    import matplotlib.pyplot as plt

    runs = tables.by_run(result)
    fig, axes = plt.subplots(len(runs), 3, figsize=(10.5, 3.3 * len(runs) + 0.3), squeeze=False)
    panels = {
        "deviation": ("output moved, % of its length", 100),
        "nll_lost": ("likelihood lost, nats a token", 1),
        "accuracy_lost": ("right tokens lost, points", 100),
    }
    for line, (run, rows) in zip(axes, runs.items(), strict=True):
        counts = sorted({row["transitions"] for row in rows})
        for ax, (column, (label, scale)) in zip(line, panels.items(), strict=True):
            for place, count in enumerate(counts):
                values = scale * np.array([row[column] for row in rows if row["transitions"] == count])
                spread = np.linspace(-0.12, 0.12, len(values))
                ax.plot(place + spread, values, "o", color=COLOURS["single"], markersize=4, alpha=0.8)
                mean = bootstrap(values)
                ax.plot([place] * 2, [mean.low, mean.high], color=COLOURS["measured"], linewidth=2.5)
                ax.plot(place, mean.estimate, "_", color=COLOURS["measured"], markersize=22, markeredgewidth=2.5)
            ax.set_xticks(range(len(counts)), [str(count) for count in counts])
            ax.set(xlabel="contiguous runs (transitions)", ylabel=label, xlim=(-0.5, len(counts) - 0.5))
            if min(row[column] for row in rows) >= 0:
                ax.set_ylim(0, None)
        layers = len(rows[0]["layers"].split(","))
        line[1].set_title(f"{run}: {layers} layers recomputed, {rows[0]['n']} items", fontsize=11)
    axes[0][0].plot([], [], "o", color=COLOURS["single"], label="one set of layers")
    axes[0][0].plot([], [], "_", color=COLOURS["measured"], markersize=16, markeredgewidth=2.5, label="mean, 95 %")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def contiguous_groups(result: Result) -> Figure:
    """Figure 11: every contiguous group's loss by the layers it recomputes, and the Pareto frontier, in the runs that
    full reuse takes out of the bound."""
    import matplotlib.pyplot as plt

    runs = tables.losing_runs(result)
    fig, axes = plt.subplots(1, len(runs), figsize=(3.6 * max(len(runs), 2) + 0.4, 4), sharey=True, squeeze=False)
    chosen_look, paper_layers = METHODS["DroidSpeak"], FIGURE_11_LAYERS / PAPER_DEPTH
    for ax, (run, rows) in zip(axes[0], runs.items(), strict=True):
        groups = profiled_groups(rows)
        depth, best, chosen = max(len(g.group) for g in groups), frontier(groups), smallest_within(groups, BOUND)
        for of, style, size in ((groups, ".", 4), (best, "-", 0), ([chosen], chosen_look.marker, 9)):
            colour = COLOURS["single"] if of is groups else chosen_look.colour
            share = [100 * len(g.group) / depth for g in of]
            ax.plot(share, [100 * g.relative_loss for g in of], style, color=colour, markersize=size)
        ax.axhline(100 * BOUND, color=COLOURS["target"], linestyle="--", linewidth=1.4)
        ax.plot(100 * paper_layers, 100 * BOUND, "D", color=COLOURS["paper"], markersize=9, markeredgecolor="black")
        reuse = next(g for g in groups if not len(g.group))
        ax.plot(0, 100 * reuse.relative_loss, METHODS["full reuse"].marker, color=REUSED, markersize=8)
        ax.plot(100, 0, METHODS["full prefill"].marker, color=METHODS["full prefill"].colour, markersize=7)
        ax.set_title(
            f"{run}, {rows[0]['n']} items:\n{chosen.group}, {len(chosen.group)} of {depth} layers", fontsize=11
        )
        ax.set_xlim(-4, 104)
    ax = axes[0][0]
    ax.plot([], [], ".", color=COLOURS["single"], label="a contiguous group")
    ax.plot([], [], "-", color=RECOMPUTED, label="Pareto frontier")
    ax.plot([], [], chosen_look.marker, color=RECOMPUTED, markersize=9, label="fewest layers within the bound")
    for method in ("full reuse", "full prefill"):
        style = METHODS[method]
        ax.plot([], [], style.marker, color=style.colour, markersize=7, label=style.label)
    ax.plot([], [], color=COLOURS["target"], linestyle="--", label="bound: 5 % of its own score")
    ax.plot([], [], "D", color=COLOURS["paper"], markeredgecolor="black", label="paper: 11 of 32 layers within it")
    fig.supxlabel("layers recomputed, % of all", fontsize=11)
    ax.set_ylabel("token accuracy lost, % of its own score")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=9.5)
    return fig


def chosen_groups(result: Result) -> Figure:
    """The chosen group of every run over the depth of the model, critical layers marked, beside the paper's."""
    import matplotlib.pyplot as plt

    runs = tables.by_run(result)
    fig, ax = plt.subplots(figsize=(9, 0.46 * (len(runs) + 1) + 1.5))
    for place, rows in enumerate(runs.values()):
        depth = sum(row["what"] == "layer" for row in rows)
        group = smallest_within(profiled_groups(rows), BOUND).group
        _depth_bar(ax, place, (group.lo, group.hi), tables.critical_of(rows), depth, RECOMPUTED)
        said = f"{group}: {len(group)} of {depth}, {100 * len(group) / depth:.0f} %" if len(group) else "none is needed"
        ax.annotate(said, (101, place), va="center", annotation_clip=False)
    low, high = FIGURE_10_GROUP
    _depth_bar(ax, len(runs), (low, high + 1), FIGURE_10_CRITICAL, PAPER_DEPTH, COLOURS["paper"])
    ax.annotate(
        f"{low}-{high}: {high + 1 - low} of {PAPER_DEPTH}, {100 * (high + 1 - low) / PAPER_DEPTH:.0f} %",
        (101, len(runs)),
        va="center",
        annotation_clip=False,
    )
    ax.set_yticks(range(len(runs) + 1), [*runs, "paper, Figure 10"])
    ax.set(xlim=(0, 100), ylim=(len(runs) + 0.6, -0.6), xlabel="depth, % of the layers")
    ax.grid(axis="y", visible=False)
    ax.barh(0, 0, color=RECOMPUTED, label="recomputed, loss within 5 %")
    ax.barh(0, 0, color=COLOURS["paper"], label="recomputed in the paper")
    ax.plot([], [], "s", color=REUSED, markeredgecolor="black", markersize=6, label="critical by itself (10 % rule)")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return fig


def _depth_bar(ax: Axes, place: float, ends: tuple[int, int], critical: Sequence[int], depth: int, colour: str) -> None:
    """Layers [lo, hi) of ``depth`` as a bar, and each of the ``critical`` ones as a square in its middle."""
    ax.barh(place, 100, color=COLOURS["other"], alpha=0.25, height=0.6)
    ax.barh(place, 100 * (ends[1] - ends[0]) / depth, left=100 * ends[0] / depth, color=colour, height=0.6)
    middles = [100 * (layer + 0.5) / depth for layer in critical]
    ax.plot(middles, [place] * len(middles), "s", color=REUSED, markeredgecolor="black", markersize=6)
