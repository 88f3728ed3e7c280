"""The figures of notebook 30, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.kvreuse.experiments import tables
from firsttoken.kvreuse.experiments.published import FIGURE_8_LAYER, PAPER_DEPTH
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.stats import Interval, bootstrap, paired_bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REUSED, RECOMPUTED = METHODS["full reuse"].colour, METHODS["DroidSpeak"].colour


def tuning_curves(recipes: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Loss of the answer's tokens by step, one panel an adapter; the line is a mean over 10 steps."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(recipes), figsize=(1.2 + 2.5 * len(recipes), 2.9), sharey=True, squeeze=False)
    for ax, (name, recipe) in zip(axes[0], recipes.items(), strict=True):
        losses = [row["answer_loss"] for row in recipe["curve"]]
        steps = np.arange(1, len(losses) + 1)
        ax.plot(steps, losses, ".", color=COLOURS["recorded"], markersize=3)
        smooth = np.convolve(losses, np.ones(10) / 10, mode="valid")
        ax.plot(steps[9:], smooth, color=COLOURS["measured"])
        ax.set(title=f"{name}: {', '.join(recipe['tasks'])}", xlabel="step", xlim=(0, None), yscale="log")
        ax.yaxis.set_major_formatter("{x:g}")
    axes[0][0].set_ylabel("loss of the answer, nats")
    return fig


def full_reuse(result: Result) -> Figure:
    """Figure 6: what the receiver answers over its own cache and over the sender's, what is lost, and the sender."""
    import matplotlib.pyplot as plt

    runs = tables.by_run(result)
    fig, axes = plt.subplots(
        1, 3, figsize=(11, 0.62 * len(runs) + 1.7), sharey=True, width_ratios=(1.5, 1, 1), squeeze=False
    )
    scores, points, relative = axes[0]
    shown = {"own": "full prefill", "reuse": "full reuse", "sender": "sender"}
    for place, rows in enumerate(runs.values()):
        items = {what: tables.only(rows, what)["item_accuracy"] for what in shown}
        for shift, (what, method) in zip((-0.2, 0.0, 0.2), shown.items(), strict=True):
            _whisker(scores, place + shift, bootstrap(items[what]), METHODS[method].colour, METHODS[method].marker, 100)
        lost = paired_bootstrap(items["own"], items["reuse"])
        _whisker(points, place, lost, REUSED, METHODS["full reuse"].marker, 100)
        _whisker(relative, place, tables.relative_loss(items["own"], items["reuse"]), REUSED, "^", 1)
    relative.axvline(50, color=COLOURS["paper"], linestyle="--")
    for ax, label in zip(
        axes[0],
        ("tokens of the answer right, %", "full reuse loses, points", "the same, % of its own score"),
        strict=True,
    ):
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
    scores.set_xlim(0, 104)  # a marker at 100 is seen whole
    for ax in (points, relative):
        ax.axvline(0, color="#666666", linewidth=0.8)
    relative.set_xlim(min(-5, relative.get_xlim()[0]), max(60, relative.get_xlim()[1]))
    apart = {run: tables.distance_of(result, rows) for run, rows in runs.items()}
    labels = [run if far is None else f"{run}\n(weights {far:.1f} % apart)" for run, far in apart.items()]
    scores.set_yticks(range(len(runs)), labels)
    scores.set_ylim(len(runs) - 0.5, -0.5)
    for method in shown.values():
        scores.plot([], [], METHODS[method].marker, color=METHODS[method].colour, label=METHODS[method].label)
    scores.plot([], [], color=COLOURS["paper"], linestyle="--", label="paper, HotpotQA: loses more than 50 %")
    fig.legend(*scores.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def sensitivity(result: Result) -> Figure:
    """Figure 7: what the reuse of one layer alone costs, and which layers the 10 % rule calls critical."""
    fig, axes, runs = grid(result, 2.3, sharey=True)
    for ax, (run, rows) in zip(axes, runs.items(), strict=False):
        own, critical = tables.only(rows, "own")["item_accuracy"], tables.critical_of(rows)
        layers = sorted((row for row in rows if row["what"] == "layer"), key=lambda row: row["lo"])
        for layer, row in enumerate(layers):
            lost = tables.relative_loss(own, row["item_accuracy"])
            colour = RECOMPUTED if layer in critical else REUSED
            ax.bar(layer, lost.estimate, color=colour, width=0.8)
            ax.plot([layer] * 2, [lost.low, lost.high], color="#777777", linewidth=1)
        ax.axhline(10, color=COLOURS["paper"], linestyle="--")
        ax.set_title(f"{run}: {len(critical)} of {len(layers)} critical", fontsize=11)
        ax.set_xlim(-0.7, len(layers) - 0.3)
    ax = axes[0]
    ax.bar(0, 0, color=REUSED, label="one layer reused")
    ax.bar(0, 0, color=RECOMPUTED, label="critical: loses more than 10 %")
    ax.plot([], [], color=COLOURS["paper"], linestyle="--", label="the paper's rule, 10 %")
    finish(fig, axes, "layer that is reused, alone (0-based)", "loss, % of its own score")
    return fig


def item_spread(result: Result) -> Figure:
    """Figure 8: how differently items suffer, by the layer that is reused, in the run that full reuse hurts most."""
    import matplotlib.pyplot as plt

    runs = tables.by_run(result)
    run, rows = max(runs.items(), key=lambda of: _reuse_loss(of[1]))
    fig, axes = plt.subplots(2, 1, figsize=(9.5, 5.2), sharex=True)
    accuracy, nll = tables.layer_losses(rows)
    depth, widest = len(accuracy), int(nll.std(1).argmax())
    counts, spread = axes
    counts.bar(range(depth), 100 * (accuracy > 0).mean(1), color=REUSED, label="answers worse")
    counts.bar(range(depth), -100 * (accuracy < 0).mean(1), color="#6699CC", label="answers better")
    counts.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    counts.set_ylabel("items, %")
    dots = {"marker": ".", "markersize": 2.5, "alpha": 0.4}
    boxes = spread.boxplot(nll.T, positions=range(depth), whis=(5, 95), flierprops=dots)
    boxes["boxes"][widest].set_linewidth(2.5)
    for median in boxes["medians"]:
        median.set_color(REUSED)
    spread.plot(range(depth), nll.mean(1), "o", color=RECOMPUTED, markersize=4, zorder=4)
    spread.set_ylabel("likelihood lost,\nnats a token")
    spread.set_title(f"items differ most at layer {widest}", fontsize=10, loc="right")
    for ax in axes:
        at = (FIGURE_8_LAYER - 0.5) / PAPER_DEPTH * depth - 0.5
        ax.axvline(at, color=COLOURS["paper"], linestyle="--", linewidth=1.2)
    counts.plot([], [], "o", color=RECOMPUTED, markersize=4, label="mean")
    counts.plot([], [], color=COLOURS["paper"], linestyle="--", label="paper: layer 23 of 32, at its relative depth")
    spread.set_xticks(range(0, depth, 2), [str(layer) for layer in range(0, depth, 2)])
    spread.set_xlabel("layer that is reused, alone (0-based)")
    fig.suptitle(f"{run}, {accuracy.shape[1]} items; boxes hold half of them, whiskers 90 %", fontsize=11)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def grid(result: Result, height: float, sharey: bool = False) -> tuple[Figure, list[Axes], dict[str, Rows]]:
    """A panel a run, three in a line of ``height`` inches; the runs are those of ``tables.by_run``."""
    import matplotlib.pyplot as plt

    runs = tables.by_run(result)
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    fig, axes = plt.subplots(
        lines, columns, figsize=(max(7, 3.7 * columns), height * lines + 0.8), squeeze=False, sharex=True, sharey=sharey
    )
    found = list(axes.flat)
    for ax in found[len(runs) :]:
        ax.remove()
    return fig, found[: len(runs)], runs


def finish(fig: Figure, axes: Sequence[Axes], across: str, up: str, columns: int = 3) -> None:
    """Name the axes of a grid once, and put the legend of its first panel above it."""
    fig.supxlabel(across, fontsize=11)
    fig.supylabel(up, fontsize=11)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns, fontsize=9.5)


def _reuse_loss(rows: Rows) -> float:
    return tables.only(rows, "own")["accuracy"] - tables.only(rows, "reuse")["accuracy"]


def _whisker(ax: Axes, place: float, interval: Interval, colour: str, marker: str, scale: float) -> None:
    ax.plot([interval.low * scale, interval.high * scale], [place] * 2, color=colour, linewidth=2)
    ax.plot(interval.estimate * scale, place, marker, color=colour, markersize=7)
