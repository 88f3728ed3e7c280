"""The figures of notebook 30, drawn from results and recipes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from firsttoken.kvreuse.experiments import tables
from firsttoken.kvreuse.experiments.published import FIGURE_8_LAYER, PAPER_DEPTH
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.stats import Interval, bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REUSED, RECOMPUTED = METHODS["full reuse"].colour, METHODS["DroidSpeak"].colour


def full_reuse(methods: Result, profile: Result) -> Figure:
    """Figure 6: what the receiver answers over its own cache and over the sender's, the sender, and what is lost.

    Above, F1 of decoded answers, the paper's metric, from ``methods`` (reuse_methods); below, right tokens of the given
    answer, from ``profile`` (layer_profile).
    """
    import matplotlib.pyplot as plt

    shown = {"own": "full prefill", "reuse": "full reuse", "sender": "sender"}
    lines = [(f"{run}, F1 of decoded answers", _decoded(rows, shown)) for run, rows in tables.by_run(methods).items()]
    decoded = len(lines)
    for run, rows in tables.by_run(profile).items():
        lines.append((f"{run}, tokens right", {what: tables.only(rows, what)["item_accuracy"] for what in shown}))
    fig, (scores, lost) = plt.subplots(1, 2, figsize=(10.5, 0.5 * len(lines) + 1.7), sharey=True, width_ratios=(1.5, 1))
    for place, (_, items) in enumerate(lines):
        for shift, (what, method) in zip((-0.2, 0.0, 0.2), shown.items(), strict=True):
            _whisker(scores, place + shift, bootstrap(items[what]), METHODS[method].colour, METHODS[method].marker, 100)
        share = tables.relative_loss(items["own"], items["reuse"])
        _whisker(lost, place, share, REUSED, METHODS["full reuse"].marker, 1)
    lost.plot([50, 50], [-0.5, decoded - 0.5], color=COLOURS["paper"], linestyle="--", linewidth=2)
    lost.axvline(0, color=COLOURS["mark"], linewidth=0.8)
    lost.set_xlim(min(-8, lost.get_xlim()[0]), 100)
    for ax, label in ((scores, "score, %"), (lost, "full reuse loses, % of own score")):
        ax.set_xlabel(label)
        ax.axhline(decoded - 0.5, color=COLOURS["mark"], linewidth=0.8)
        ax.grid(axis="y", visible=False)
    scores.set_xlim(-2, 104)  # a marker at 100 is seen whole
    scores.set_yticks(range(len(lines)), [name for name, _ in lines])
    scores.set_ylim(len(lines) - 0.5, -0.5)
    scores.set_title(f"n = {len(lines[0][1]['own'])} items each", fontsize=11)
    for method in shown.values():
        scores.plot([], [], METHODS[method].marker, color=METHODS[method].colour, label=METHODS[method].label)
    scores.plot([], [], color=COLOURS["paper"], linestyle="--", label="paper: loses more than 50 %")
    fig.legend(*scores.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def _decoded(rows: Rows, shown: Mapping[str, str]) -> dict[str, list[float]]:
    """Scores of the items by what is shown, of one run of reuse_methods."""
    by_method = {row["method"]: row["item_score"] for row in rows}
    return {what: by_method[method] for what, method in shown.items()}


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
            ax.plot([layer] * 2, [lost.low, lost.high], color=COLOURS["mark"], linewidth=1)
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
    """Figure 8: how differently items suffer, by the layer that is reused, in the runs that full reuse hurts."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 3.8))
    for (run, rows), marker in zip(tables.losing_runs(result).items(), "os^Dv<>", strict=False):
        accuracy, _ = tables.layer_losses(rows)
        spread, label = 100 * accuracy.std(1), f"{run}, {accuracy.shape[1]} items"
        ax.plot(
            range(len(spread)), spread, f"{marker}-", color=COLOURS["measured"], markersize=5, alpha=0.8, label=label
        )
        depth = len(spread)
    at = (FIGURE_8_LAYER - 0.5) / PAPER_DEPTH * depth - 0.5
    ax.axvline(
        at, color=COLOURS["paper"], linestyle="--", linewidth=2, label="paper: layer 23 of 32, at its relative depth"
    )
    ax.set_xticks(range(0, depth, 2))
    ax.set(xlabel="layer that is reused, alone (0-based)", ylim=(0, None))
    ax.set_ylabel("standard deviation over items\nof the accuracy lost, points")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=2)
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


def _whisker(ax: Axes, place: float, interval: Interval, colour: str, marker: str, scale: float) -> None:
    ax.plot([interval.low * scale, interval.high * scale], [place] * 2, color=colour, linewidth=2)
    ax.plot(interval.estimate * scale, place, marker, color=colour, markersize=7)
