"""The figures of notebooks 30 and 31, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.kvreuse.experiments import tables
from firsttoken.kvreuse.experiments.profiling import BOUND, profiled_groups
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.kvreuse.profile.pareto import frontier, smallest_within
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.stats import Interval, bootstrap, paired_bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REUSED, RECOMPUTED = METHODS["full reuse"].colour, METHODS["DroidSpeak"].colour
PAPER_GROUP, PAPER_CRITICAL, PAPER_DEPTH = (16, 27), (16, 17, 18, 20, 25, 26, 27), 32  # Figure 10, as printed


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
        ax.set(title=f"{name}: {', '.join(recipe['tasks'])}", xlabel="step", xlim=(0, None), ylim=(0, None))
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
    relative.axvline(50, color=COLOURS["paper"], linestyle="--", label="paper, HotpotQA:\nmore than 50 %")
    relative.legend(fontsize=9, loc="lower right")
    for ax, label in zip(
        axes[0],
        ("tokens of the answer right, %", "full reuse loses, points", "the same, % of its own score"),
        strict=True,
    ):
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
    scores.set_xlim(0, 100)
    for ax in (points, relative):
        ax.axvline(0, color="#666666", linewidth=0.8)
    relative.set_xlim(min(-5, relative.get_xlim()[0]), max(60, relative.get_xlim()[1]))
    apart = [result.summary[f"{tables.key_of(rows[0])}_weight_distance_pct"]["value"] for rows in runs.values()]
    labels = [f"{run}\n(weights {far:.1f} % apart)" for run, far in zip(runs, apart, strict=True)]
    scores.set_yticks(range(len(runs)), labels)
    scores.set_ylim(len(runs) - 0.5, -0.5)
    for method in shown.values():
        scores.plot([], [], METHODS[method].marker, color=METHODS[method].colour, label=METHODS[method].label)
    fig.legend(*scores.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return fig


def sensitivity(result: Result) -> Figure:
    """Figure 7: what the reuse of one layer alone costs, and which layers the 10 % rule calls critical."""
    fig, axes, runs = _grid(result, 2.3)
    for ax, (run, rows) in zip(axes, runs.items(), strict=False):
        own, critical = tables.only(rows, "own")["item_accuracy"], tables.critical_of(rows)
        layers = sorted((row for row in rows if row["what"] == "layer"), key=lambda row: row["lo"])
        for layer, row in enumerate(layers):
            lost = tables.relative_loss(own, row["item_accuracy"])
            colour = RECOMPUTED if layer in critical else REUSED
            ax.bar(layer, lost.estimate, color=colour, width=0.8)
            ax.plot([layer] * 2, [lost.low, lost.high], color="#444444", linewidth=0.8)
        ax.axhline(10, color=COLOURS["paper"], linestyle="--")
        ax.set_title(f"{run}: {len(critical)} of {len(layers)} critical", fontsize=11)
        ax.set_xlim(-0.7, len(layers) - 0.3)
    ax = axes[0]
    ax.bar(0, 0, color=REUSED, label="one layer reused")
    ax.bar(0, 0, color=RECOMPUTED, label="critical: loses more than 10 %")
    ax.plot([], [], color=COLOURS["paper"], linestyle="--", label="the paper's rule, 10 %")
    _finish(fig, axes, "layer that is reused, alone (0-based)", "loss, % of its own score")
    return fig


def item_spread(result: Result) -> Figure:
    """Figure 8: how differently items suffer, by the layer that is reused, in the run that full reuse hurts most."""
    import matplotlib.pyplot as plt

    runs = tables.by_run(result)
    run, rows = max(runs.items(), key=lambda of: _reuse_loss(of[1]))
    fig, axes = plt.subplots(2, 1, figsize=(9.5, 5.2), sharex=True)
    accuracy, nll = tables.layer_losses(rows)
    depth = len(accuracy)
    for ax, losses, label in (
        (axes[0], 100 * accuracy, "right tokens lost,\npoints"),
        (axes[1], nll, "likelihood lost,\nnats a token"),
    ):
        widest = int(losses.std(1).argmax())
        ax.plot(range(depth), losses.mean(1), "o", color=RECOMPUTED, markersize=4, label="mean", zorder=4)
        boxes = ax.boxplot(
            losses.T, positions=range(depth), whis=(5, 95), flierprops={"marker": ".", "markersize": 2.5, "alpha": 0.4}
        )
        boxes["boxes"][widest].set_linewidth(2.5)
        for median in boxes["medians"]:
            median.set_color(REUSED)
        ax.axvline((22.5 / PAPER_DEPTH) * depth, color=COLOURS["paper"], linestyle="--", linewidth=1.2)
        ax.set_ylabel(label)
        ax.annotate(f"differs most: layer {widest}", (0.995, 0.93), xycoords="axes fraction", ha="right", va="top")
    axes[0].plot([], [], color=REUSED, label="median")
    axes[0].plot([], [], color=COLOURS["paper"], linestyle="--", label="paper: layer 23 of 32, at its relative depth")
    axes[1].set_xticks(range(0, depth, 2), [str(layer) for layer in range(0, depth, 2)])
    axes[1].set_xlabel("layer that is reused, alone (0-based)")
    fig.suptitle(f"{run}, {accuracy.shape[1]} items; boxes hold half of them, whiskers 90 %", fontsize=11)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


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
                ax.plot(place + spread, values, "o", color=COLOURS["recorded"], markersize=4, alpha=0.8)
                mean = bootstrap(values)
                ax.plot([place] * 2, [mean.low, mean.high], color=COLOURS["measured"], linewidth=2.5)
                ax.plot(place, mean.estimate, "_", color=COLOURS["measured"], markersize=22, markeredgewidth=2.5)
            ax.set_xticks(range(len(counts)), [str(count) for count in counts])
            ax.set(xlabel="contiguous runs (transitions)", ylabel=label, xlim=(-0.5, len(counts) - 0.5))
            if min(row[column] for row in rows) >= 0:
                ax.set_ylim(0, None)
        layers = len(rows[0]["layers"].split(","))
        line[1].set_title(f"{run}: {layers} layers recomputed, {rows[0]['n']} items", fontsize=11)
    axes[0][0].plot([], [], "o", color=COLOURS["recorded"], label="one set of layers")
    axes[0][0].plot([], [], "_", color=COLOURS["measured"], markersize=16, markeredgewidth=2.5, label="mean, 95 %")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def contiguous_groups(result: Result) -> Figure:
    """Figure 11: every contiguous group's loss by the layers it recomputes, the Pareto frontier, and the bounds."""
    fig, axes, runs = _grid(result, 3.0)
    for ax, (run, rows) in zip(axes, runs.items(), strict=False):
        groups = profiled_groups(rows)
        own, depth = float(np.mean(groups[0].own)), max(len(g.group) for g in groups)
        best, chosen = frontier(groups), smallest_within(groups, BOUND)
        ax.plot(
            [len(g.group) for g in groups], [100 * g.relative_loss for g in groups], ".", color="#6699CC", markersize=4
        )
        ax.plot([len(g.group) for g in best], [100 * g.relative_loss for g in best], "-", color=RECOMPUTED)
        ax.plot(len(chosen.group), 100 * chosen.relative_loss, "o", color=RECOMPUTED, markersize=9)
        ax.axhline(100 * BOUND, color=COLOURS["paper"], linestyle="--")
        ax.axhline(100 * BOUND / own, color=COLOURS["paper"], linestyle=":")
        reuse = next(g for g in groups if not len(g.group))
        ax.plot(0, 100 * reuse.relative_loss, METHODS["full reuse"].marker, color=REUSED, markersize=8)
        ax.plot(depth, 0, METHODS["full prefill"].marker, color=METHODS["full prefill"].colour, markersize=7)
        ax.set_title(f"{run}: layers {chosen.group}", fontsize=11)
        right = ax.secondary_yaxis("right", functions=(lambda y, own=own: y * own, lambda y, own=own: y / own))
        right.set_ylabel("points", fontsize=10)
    ax = axes[0]
    ax.plot([], [], ".", color="#6699CC", label="a contiguous group")
    ax.plot([], [], "-", color=RECOMPUTED, label="Pareto frontier")
    ax.plot([], [], "o", color=RECOMPUTED, markersize=9, label="fewest layers within 5 %")
    for method in ("full reuse", "full prefill"):
        style = METHODS[method]
        ax.plot([], [], style.marker, color=style.colour, markersize=7, label=style.label)
    ax.plot([], [], color=COLOURS["paper"], linestyle="--", label="bound: 5 % of its own (paper)")
    ax.plot([], [], color=COLOURS["paper"], linestyle=":", label="bound: 5 points (report)")
    _finish(fig, axes, "layers recomputed", "loss, % of its own score", columns=4)
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
    low, high = PAPER_GROUP
    _depth_bar(ax, len(runs), (low, high + 1), PAPER_CRITICAL, PAPER_DEPTH, COLOURS["paper"])
    ax.annotate("16-27: 12 of 32, 38 %", (101, len(runs)), va="center", annotation_clip=False)
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
    ax.barh(place, 100, color="#F0F0F0", height=0.6)
    ax.barh(place, 100 * (ends[1] - ends[0]) / depth, left=100 * ends[0] / depth, color=colour, height=0.6)
    middles = [100 * (layer + 0.5) / depth for layer in critical]
    ax.plot(middles, [place] * len(middles), "s", color=REUSED, markeredgecolor="black", markersize=6)


def _grid(result: Result, height: float) -> tuple[Figure, list[Axes], dict[str, Rows]]:
    """A panel a run, three in a line, those without a run taken away."""
    import matplotlib.pyplot as plt

    runs = tables.by_run(result)
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    fig, axes = plt.subplots(
        lines, columns, figsize=(max(7, 3.7 * columns), height * lines + 0.8), squeeze=False, sharex=True
    )
    found = list(axes.flat)
    for ax in found[len(runs) :]:
        ax.remove()
    return fig, found[: len(runs)], runs


def _finish(fig: Figure, axes: Sequence[Axes], across: str, up: str, columns: int = 3) -> None:
    fig.supxlabel(across, fontsize=11)
    fig.supylabel(up, fontsize=11)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns, fontsize=9.5)


def _reuse_loss(rows: Rows) -> float:
    return tables.only(rows, "own")["accuracy"] - tables.only(rows, "reuse")["accuracy"]


def _whisker(ax: Axes, place: float, interval: Interval, colour: str, marker: str, scale: float) -> None:
    ax.plot([interval.low * scale, interval.high * scale], [place] * 2, color=colour, linewidth=2)
    ax.plot(interval.estimate * scale, place, marker, color=colour, markersize=7)
