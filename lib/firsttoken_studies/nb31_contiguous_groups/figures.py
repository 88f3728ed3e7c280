"""The figures of notebook 31, drawn from results alone, and the picture that it opens with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.profile.pareto import Profiled
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak import tables
from firsttoken_studies.droidspeak.published import FIGURE_10_CRITICAL, FIGURE_10_GROUP, FIGURE_11_LAYERS, PAPER_DEPTH
from firsttoken_studies.droidspeak.styles import METHODS, in_words
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, choice_of, critical_of, profiled_groups
from firsttoken_studies.nb30_full_reuse_and_sensitivity.sensitivity import RECOMPUTED, REUSED
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, panels
from firsttoken_studies.record.results import Result, Rows, frame_of
from firsttoken_studies.record.schematic import Schematic

FEW = 5  # sets: with fewer an own run has no interval


def schematic() -> Schematic:
    """Draw two sets of layers that the receiver computes again: one contiguous group, and as many apart."""
    alt = (
        "The twelve layers of a model, side by side. Above, four neighbouring layers are recomputed, from the E-cache "
        "that the sender left below the first of them; the other layers reuse the sender's keys and values. "
        "Below, the four recomputed layers lie apart: each starts from the sender's E-cache, and each start adds error."
    )
    sketch = Schematic(17, 6.5, alt)
    rows = {
        1.1: "One contiguous group: one start from the sender's E-cache",
        4.4: "Apart: four starts, and each adds error",
    }
    for (y, title), recomputed in zip(rows.items(), ((5, 6, 7, 8), (2, 4, 7, 10)), strict=True):
        sketch.text(0.2, y - 0.6, title, heading=True)
        for layer in range(12):
            again = layer in recomputed
            sketch.box(0.2 + layer, y, str(layer), "droidspeak" if again else "full reuse")
            if again and layer - 1 not in recomputed:
                sketch.arrow((layer + 0.3, y + 1.75), (layer + 0.3, y + 1.02), look="E-cache")
    sketch.text(5.6, 2.7, "E-cache")
    sketch.box(12.9, 2.4, "", "full reuse", width=0.6, height=0.6)
    sketch.text(13.7, 2.7, "layer reused")
    sketch.box(12.9, 3.2, "", "droidspeak", width=0.6, height=0.6)
    sketch.text(13.7, 3.5, "layer recomputed")
    return sketch


def transition_errors(recorded: Result | None, now: Result) -> Figure:
    """Figure 10: the error by the number of contiguous runs that equally many recomputed layers lie in."""
    results = over(recorded, now)
    runs = tables.by_run(results[0].result)
    fig, axes = panels(len(runs), 3, figsize=(9, 3 * len(runs) + 0.9), squeeze=False)
    columns = {
        "deviation": ("output moved, % of its length", 100),
        "nll_lost": ("likelihood lost, nats a token", 1),
        "accuracy_lost": ("token accuracy lost, points", 100),
    }
    for line, (run, first) in zip(axes, runs.items(), strict=True):
        counts = sorted({row["transitions"] for row in first})
        for ax, (column, (label, scale)) in zip(line, columns.items(), strict=True):
            for shown in results:
                rows = tables.by_run(shown.result).get(run, [])
                for position, count in enumerate(counts):
                    values = [scale * row[column] for row in rows if row["transitions"] == count]
                    if values:
                        few = shown.own and not shown.alone and len(values) < FEW
                        entry = {"value": float(np.mean(values))} if few else bootstrap(values).summary()
                        shown.point(ax, position + shown.shift, entry, "measured")
                    if values and not shown.repeats(ax, f"sets {count}", tuple(values)):
                        spread = position + shown.shift + np.linspace(-0.06, 0.06, len(values))
                        ax.plot(spread, values, "o", color=COLOURS["single"], markersize=3.5, **shown.style)
            ax.set_xticks(range(len(counts)), [str(count) for count in counts])
            ax.set(xlabel="contiguous groups of layers", ylabel=label, xlim=(-0.5, len(counts) - 0.5))
        layers = len(first[0]["layers"].split(","))
        line[1].set_title(f"{in_words(run)}, {layers} layers recomputed, {first[0]['n']} items", fontsize=10)
    axes[0][0].plot([], [], "o", color=COLOURS["single"], markersize=4, label="one random set of layers")
    axes[0][0].plot([], [], "o", color=COLOURS["measured"], label="mean of the sets, 95 %")
    fig.suptitle(f"With equally many layers recomputed, {_least_error(runs)}", fontsize=12)
    legend(fig, axes[0][0], results, "deviation", columns=2)
    return fig


def _least_error(runs: Mapping[str, Rows]) -> str:
    """Say whether the output moves least in every run where the recomputed layers are one contiguous group."""
    best = []
    for rows in runs.values():
        moved = frame_of(rows).groupby("transitions").deviation.mean()
        best.append(int(moved.idxmin()))
    if {*best} == {1}:
        return "one contiguous group moves the output least"
    return f"{', '.join(map(str, best))} groups move the output least"


def contiguous_groups(recorded: Result | None, now: Result) -> Figure:
    """Figure 11: every contiguous group's loss by the layers it recomputes, and the Pareto frontier, in the runs that
    full reuse takes out of the bound."""
    results = over(recorded, now)
    runs, look, most = tables.losing_runs(results[0].result), METHODS["DroidSpeak"], 0.0
    fig, axes = panels(1, len(runs), figsize=(9, 4.9), sharey=True, squeeze=False)
    for ax, (run, rows) in zip(axes[0], runs.items(), strict=True):
        for shown in results:
            if groups := tables.by_run(shown.result).get(run):
                _groups_of(ax, groups, shown)
        ax.axhline(100 * BOUND, color=COLOURS["target"], linestyle="--", linewidth=1.4)
        paper = 100 * FIGURE_11_LAYERS / PAPER_DEPTH
        ax.plot(paper, 100 * BOUND, "D", color=COLOURS["paper"], markersize=9, markeredgecolor="black", zorder=3)
        ax.plot(100, 0, METHODS["full prefill"].marker, color=METHODS["full prefill"].colour, markersize=7)
        chosen, depth = choice_of(rows)[1], tables.depth_of(rows)
        most = max(most, 100 * len(chosen.group) / depth)
        caption = f"{chosen.group}: {len(chosen.group)} of {depth} layers, n = {rows[0]['n']}"
        ax.set_title(f"{in_words(run)}\n{caption}", fontsize=9)
        ax.set_xlim(-4, 104)
    ax = axes[0][0]
    ax.plot([], [], ".", color=COLOURS["single"], label="a contiguous group")
    ax.plot([], [], "-", color=RECOMPUTED, label="Pareto frontier")
    ax.plot([], [], look.marker, color=RECOMPUTED, markersize=9, label="fewest layers within the bound")
    for method in ("full reuse", "full prefill"):
        style = METHODS[method]
        ax.plot([], [], style.marker, color=style.colour, markersize=7, label=style.label)
    ax.plot([], [], color=COLOURS["target"], linestyle="--", label="bound: 5 % of its own score")
    ax.plot([], [], "D", color=COLOURS["paper"], markeredgecolor="black", label="paper: 11 of 32 layers within it")
    axes[0][len(runs) // 2].set_xlabel("layers recomputed, % of all")
    ax.set_ylabel("token accuracy lost, % of its own score")
    fig.suptitle(
        f"By token accuracy, one group of at most {most:.0f} % of the layers keeps the loss within 5 %", fontsize=12
    )
    legend(fig, ax, results)
    return fig


def _groups_of(ax: Axes, rows: Rows, shown: DrawnResult) -> None:
    """Every group of a run, the frontier over them, and the one that is chosen."""
    groups, look, depth = profiled_groups(rows), METHODS["DroidSpeak"], tables.depth_of(rows)
    best, chosen = choice_of(rows)
    edge = {"markeredgecolor": "black"} if shown.own else {}

    def draw(profiled_groups: Sequence[Profiled], style: str, colour: str, **more: Any) -> None:
        share = [100 * len(g.group) / depth for g in profiled_groups]
        lost = [100 * g.relative_loss for g in profiled_groups]
        if not shown.repeats(ax, style + colour, (*share, *lost)):
            ax.plot(share, lost, style, color=colour, **(shown.style | more))

    style, size = ("o", 4) if shown.own else (".", 7)
    draw(groups, style, COLOURS["single"], markersize=size, markeredgewidth=0.5, **edge)
    draw(best, "-", look.colour)
    draw([chosen], look.marker, look.colour, markersize=9, **edge)
    draw([g for g in groups if not len(g.group)], METHODS["full reuse"].marker, REUSED, markersize=8, **edge)


def chosen_groups(recorded: Result | None, now: Result) -> Figure:
    """The group that token accuracy chooses in every run over the depth of the model, beside the paper's."""
    results = over(recorded, now)
    runs = tables.by_run(results[0].result)
    fig, ax = panels(figsize=(9, 0.5 * (len(runs) + 1) + 1.9))
    for position, run in enumerate(runs):
        for shown in results:
            rows = tables.by_run(shown.result).get(run)
            if rows and not shown.repeats(ax, run, choice_of(rows)[1].group):
                depth, group = tables.depth_of(rows), choice_of(rows)[1]
                _depth_bar(ax, position + shown.shift, group.group, critical_of(rows), depth, RECOMPUTED, shown)
                label = f"{group.group}: {len(group.group)} of {depth}" if len(group.group) else "none is needed"
                label += "" if shown.alone or not shown.own else " (your cell)" if shown.library else " (yours)"
                ax.annotate(label, (101, position + shown.shift), va="center", annotation_clip=False, fontsize=8.5)
    low, high = FIGURE_10_GROUP
    paper, last = Group(low, high + 1), len(runs)
    _depth_bar(ax, last, paper, FIGURE_10_CRITICAL, PAPER_DEPTH, COLOURS["paper"], DrawnResult(now, own=True))
    paper_label = f"{paper}: {len(paper)} of {PAPER_DEPTH}"
    ax.annotate(paper_label, (101, last), va="center", annotation_clip=False, fontsize=8.5)
    ax.set_yticks(range(last + 1), [*map(in_words, runs), "paper, Figure 10"], fontsize=9)
    ax.set(xlim=(0, 100), ylim=(last + 0.6, -0.6), xlabel="depth, % of the layers")
    ax.grid(axis="y", visible=False)
    ax.barh(0, 0, color=RECOMPUTED, label="recomputed: token accuracy within 5 %")
    ax.barh(0, 0, color=COLOURS["paper"], label="recomputed in the paper")
    ax.plot([], [], "s", color=REUSED, markeredgecolor="black", markersize=6, label="critical by itself (10 % rule)")
    fig.suptitle("The group that token accuracy chooses for each pair of models and task", fontsize=12)
    legend(fig, ax, results)
    return fig


def _depth_bar(
    ax: Axes, position: float, group: Group, critical: Sequence[int], depth: int, colour: str, shown: DrawnResult
) -> None:
    """A group of ``depth`` layers as a bar, and each of the ``critical`` ones as a square in its middle."""
    height = 0.6 if shown.alone else 0.28
    ax.barh(position, 100, color=COLOURS["other"], alpha=0.25, height=height)
    edge = "black" if shown.own and not shown.alone else colour
    ax.barh(position, 100 * len(group) / depth, left=100 * group.lo / depth, color=colour, height=height,
            edgecolor=edge, **shown.style)  # fmt: skip
    middles = [100 * (layer + 0.5) / depth for layer in critical]
    ax.plot(middles, [position] * len(middles), "s", color=REUSED, markeredgecolor="black", markersize=5, zorder=5)
