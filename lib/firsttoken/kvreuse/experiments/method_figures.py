"""Figure 14 and the gains that follow from it, in notebook 33."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.kvreuse.experiments.method_summary import ABOVE_BLEND, ACCURACY, DECODED
from firsttoken.kvreuse.experiments.methods import BLEND, CHOOSE, COMPUTE, DROIDSPEAK, JUDGE, LATENCY, OWN, where_of
from firsttoken.kvreuse.experiments.profiling import BOUND
from firsttoken.kvreuse.experiments.setting import run_of
from firsttoken.kvreuse.experiments.styles import METHODS, style_of
from firsttoken.kvreuse.experiments.tables import by_run, relative_loss
from firsttoken.study.measures import Entry
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_GAIN, PAPER_MEAN_GAIN = (1.7, 3.1), 2.1  # 5.2, 8 pairs with 3 data sets each
PAPER_LEAD, PAPER_MEAN_LEAD = (5, 33), 16  # over CacheBlend at equal latency, 5.2
_BLENDS = {  # by how CacheBlend's share was found: what a legend says, and how much of the mark is filled
    LATENCY: ("CacheBlend at equal latency", "full"),
    COMPUTE: ("CacheBlend at equal computation", "left"),
    "": ("CacheBlend, its own share of tokens", "none"),
}


def quality_by_latency(methods: Result) -> Figure:
    """Figure 14: what is kept of the own score against the time to the first token, one panel a run.

    The line is the frontier, answered by the items that choose; marks are answered by the items that judge. Bars are
    95 % over items. Of CacheBlend's ways to choose tokens the better one is shown.
    """
    import matplotlib.pyplot as plt

    runs = by_run(methods)
    fig, axes = plt.subplots(1, len(runs), figsize=(1 + 3.4 * len(runs), 4.4), squeeze=False, sharey=True)
    for ax, (run, rows) in zip(axes[0], runs.items(), strict=True):
        _panel(ax, rows)
        ax.set_title(f"{run}, n = {rows[0]['n']}", fontsize=10.5)
        ax.set_xlabel("time to first token / full prefill's")
    axes[0][0].set_ylabel(f"{rows[0]['metric']} kept, % of the own")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8.5)
    return fig


def _panel(ax: Axes, rows: Rows) -> None:
    ax.axhline(100 * (1 - BOUND), color=COLOURS["paper"], linestyle="--", linewidth=1.4, label="paper: 5 % may be lost")
    look = METHODS[DROIDSPEAK]
    line = sorted((row for row in rows if row["items"] == CHOOSE), key=lambda row: row["hi"] - row["lo"])
    points = [(_time(row), 100 - relative_loss(line[-1]["item_score"], row["item_score"]).estimate) for row in line]
    ax.plot(*zip(*points, strict=True), f"{look.marker}-", color=look.colour, linewidth=1, alpha=0.6, fillstyle="none")
    ax.plot([], [], "o-", color=look.colour, alpha=0.6, fillstyle="none", label="partial prefill, items that choose")
    judged = [row for row in rows if row["items"] == JUDGE]
    own = next(row for row in judged if row["method"] == OWN)["item_score"]
    for row, label, fill in _shown(judged):
        style, lost = style_of(row["method"]), relative_loss(own, row["item_score"])
        at = _time(row)
        bars = [[lost.high - lost.estimate], [lost.estimate - lost.low]]
        ax.errorbar(at, 100 - lost.estimate, bars, color=style.colour, linewidth=1.4, alpha=0.6, capsize=3)
        size = 9.5 if row["method"] == DROIDSPEAK else 7.5
        ax.plot(at, 100 - lost.estimate, style.marker, color=style.colour, label=label, fillstyle=fill, markersize=size)
    ax.set_xlim(-0.04, 1.06)


def _shown(judged: Rows) -> list[tuple[dict[str, Any], str, str]]:
    """Rows with label and fill: every method, and of CacheBlend's that were asked alike the one that scores best."""
    found: dict[str, tuple[dict[str, Any], str, str]] = {}
    for row in judged:
        label, fill = style_of(row["method"]).label, "full"
        where = where_of(row["method"])
        if where["method"] == BLEND:
            label, fill = _BLENDS[where.get("case", "")]
        elif row["method"] == DROIDSPEAK:
            label = "DroidSpeak, the chosen group"
        if label not in found or row["score"] > found[label][0]["score"]:
            found[label] = (row, label, fill)
    return list(found.values())


def _time(row: dict[str, Any]) -> float:
    return float(np.median(row["time_share"]))


def gains(methods: Result) -> Figure:
    """What the chosen group gains, what it loses on other items, and its lead over CacheBlend: by run and on average.

    Open marks are the group that token accuracy would choose, and the lead at equal computation.
    """
    import matplotlib.pyplot as plt

    runs = by_run(methods)
    names = [*runs, "mean"]
    fig, (gain, loss, lead) = plt.subplots(1, 3, figsize=(11, 0.6 * len(names) + 2.1), sharey=True)
    for ax, span, mean in ((gain, PAPER_GAIN, PAPER_MEAN_GAIN), (lead, PAPER_LEAD, PAPER_MEAN_LEAD)):
        ax.axvspan(*span, color=COLOURS["paper"], alpha=0.25, linewidth=0, label="paper: range and mean")
        ax.axvline(mean, color=COLOURS["paper"], linewidth=2)
    loss.axvspan(-100, 100 * BOUND, color=COLOURS["paper"], alpha=0.25, linewidth=0)
    for ax, nothing in ((gain, 1), (loss, 0), (lead, 0)):
        ax.axvline(nothing, color=COLOURS["mark"], linewidth=0.8)
        ax.grid(axis="y", visible=False)
    for at, place in enumerate([*(run_of(rows[0]) for rows in runs.values()), {"across": "mean"}]):
        for ax, measure, filled, hollow in (
            (gain, "speedup_x", DECODED, ACCURACY),
            (loss, "relative_loss_pct", {"method": DROIDSPEAK}, ACCURACY),
            (lead, "score_above_points", ABOVE_BLEND | {"case": LATENCY}, ABOVE_BLEND | {"case": COMPUTE}),
        ):
            _dot(ax, methods.summary.get(measure, **filled, **place), at - 0.12, "full")
            _dot(ax, methods.summary.get(measure, **hollow, **place), at + 0.16, "none")
    gain.set(xlabel="full prefill's time to first token\n/ DroidSpeak's", xlim=(0.9, None))
    loss.set(xlabel="score lost by the chosen group,\n% of the own", xlim=(min(-5, _low(loss)), None))
    lead.set_xlabel("score above CacheBlend's, points")
    gain.set_yticks(range(len(names)), names)
    gain.set_ylim(len(names) - 0.5, -0.5)
    for fill, label in (
        ("full", "decoded answers choose; equal latency"),
        ("none", "token accuracy chooses; equal computation"),
    ):
        gain.plot([], [], "o", color=METHODS[DROIDSPEAK].colour, fillstyle=fill, markersize=8, label=label)
    fig.legend(*gain.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return fig


def _low(ax: Axes) -> float:
    """The least of what is drawn as lines."""
    return min(float(line.get_xdata()[0]) for line in ax.lines)


def _dot(ax: Axes, entry: Entry | None, at: float, fill: str) -> None:
    if entry is None:
        return
    ax.plot([entry["low"], entry["high"]], [at, at], color=METHODS[DROIDSPEAK].colour, linewidth=1.8, alpha=0.7)
    ax.plot(entry["value"], at, "o", color=METHODS[DROIDSPEAK].colour, markersize=8, fillstyle=fill)
