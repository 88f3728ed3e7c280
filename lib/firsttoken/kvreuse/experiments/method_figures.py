"""Figure 14 and the gains that follow from it, in notebook 33."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.kvreuse.experiments.methods import DROIDSPEAK, OWN, REUSE
from firsttoken.kvreuse.experiments.profiling import BOUND
from firsttoken.kvreuse.experiments.setting import key_of
from firsttoken.kvreuse.experiments.speedups import BOUNDS, TimeShares
from firsttoken.kvreuse.experiments.styles import METHODS, style_of
from firsttoken.kvreuse.experiments.tables import by_run
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.stats import bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_GAIN, PAPER_MEAN_GAIN = (1.7, 3.1), 2.1  # 5.2, 8 pairs with 3 data sets each
PAPER_LEAD, PAPER_MEAN_LEAD = (5, 33), 16  # over CacheBlend at equal latency, 5.2
_FILLS = {"": "full", "gradual": "none", "from": "left"}  # CacheBlend's variants


def quality_by_latency(methods: Result, times: TimeShares) -> Figure:
    """Figure 14: score against the time to the first token, one panel a run; bars are 95 % over items."""
    import matplotlib.pyplot as plt

    runs = by_run(methods)
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    fig, axes = plt.subplots(
        lines, columns, figsize=((3.7 if columns > 2 else 5) * columns + 0.6, 3.3 * lines + 1.1), squeeze=False
    )
    fig.get_layout_engine().set(w_pad=0.12)
    for ax, (run, rows) in zip(axes.flat, runs.items(), strict=False):
        _panel(ax, rows, times)
        ax.set_title(f"{run}, n = {rows[0]['n']}", fontsize=10.5)
        ax.set_ylabel(f"{rows[0]['metric']}, %")
    for ax in axes.flat[len(runs) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel(f"time to first token / full prefill's\n({times.tokens:,} tokens, no link)")
    shown: dict[str, Any] = {}
    for ax in axes.flat:
        handles, labels = ax.get_legend_handles_labels()
        shown |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in shown}
    fig.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(4, max(2, columns)), fontsize=9)
    return fig


def _panel(ax: Axes, rows: Rows, times: TimeShares) -> None:
    own = 100 * next(row["score"] for row in rows if row["method"] == OWN)
    ax.axhline((1 - BOUND) * own, color=COLOURS["paper"], linestyle="--", linewidth=1.4, label="5 % below its own")
    ax.axhline(own - 100 * BOUND, color=COLOURS["paper"], linestyle=":", linewidth=1.4, label="5 points below its own")
    groups = sorted((row for row in rows if row["method"].startswith((REUSE, DROIDSPEAK))), key=lambda r: r["compute"])
    line = [(float(np.median(times.of(DROIDSPEAK, row["compute"]))), 100 * row["score"]) for row in groups]
    ax.plot(*zip(*line, (1.0, own), strict=True), "-", color=METHODS[DROIDSPEAK].colour, linewidth=1, alpha=0.6)
    for row in rows:
        method, label, look = row["method"], label_of(row["method"]), style_of(row["method"])
        timed = DROIDSPEAK if method == REUSE else next(name for name in METHODS if method.startswith(name))
        at = float(np.median(times.of(timed, row["compute"])))
        score = bootstrap(row["item_score"])
        equal, other_group = " equal" in method, method.startswith(f"{DROIDSPEAK} ")
        ax.plot([at, at], [100 * score.low, 100 * score.high], color=look.colour, linewidth=1.2, alpha=0.55)
        ax.plot(
            at,
            100 * score.estimate,
            look.marker,
            color=look.colour,
            label=label,
            fillstyle="none" if other_group else _FILLS[_variant(method).partition(" ")[0]],
            markersize=6 if other_group else 9 if method == DROIDSPEAK or equal else 7.5,
        )
    ax.set_xlim(-0.02, max(1.05, ax.get_xlim()[1]))


def label_of(method: str) -> str:
    """A method as a legend has it: "CacheBlend 0.15 gradual" becomes "CacheBlend 15 %, gradual"."""
    if method == DROIDSPEAK:
        return "DroidSpeak, the chosen group"
    if method.startswith(DROIDSPEAK):
        return "DroidSpeak, other groups of the frontier"
    if not method.startswith("CacheBlend"):
        return style_of(method).label
    share = method.split()[1]
    said = "at equal compute" if share == "equal" else f"{100 * float(share):g} %"
    start, _, layers = _variant(method).partition(" ")
    return f"CacheBlend {said}" + {"": "", "gradual": ", gradual", "from": f", first {layers} layers whole"}[start]


def _variant(method: str) -> str:
    return " ".join(method.split()[2:]) if method.startswith("CacheBlend") else ""


def gains(rows: Rows, methods: Result) -> Figure:
    """Left: speed-up at the loss bound, ``rows`` of ``speedups``. Right: lead over CacheBlend at equal compute."""
    import matplotlib.pyplot as plt

    runs = list(dict.fromkeys(row["run"] for row in rows))
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 0.55 * len(runs) + 2.2), sharey=True)
    for ax, span, mean in ((left, PAPER_GAIN, PAPER_MEAN_GAIN), (right, PAPER_LEAD, PAPER_MEAN_LEAD)):
        ax.axvspan(*span, color=COLOURS["paper"], alpha=0.25, linewidth=0, label="paper: range")
        ax.axvline(mean, color=COLOURS["paper"], linewidth=2, label="paper: mean")
        ax.grid(axis="y", visible=False)
    reused = [row for row in rows if not row["layers"]]
    for shift, (bound, marker) in enumerate(zip(BOUNDS, ("o", "s"), strict=True)):
        mended = [row for row in rows if row["bound"] == bound and row["layers"]]
        for row in (row for row in rows if row["bound"] == bound):
            at, look = runs.index(row["run"]) + 0.24 * (shift - 0.5), METHODS[DROIDSPEAK if row["layers"] else REUSE]
            first = f"here: losing at most {bound}" if row in mended[:1] else None
            label = "here: full reuse keeps to the bound" if row in reused[:1] else first
            _dot(left, row["gain"], at, marker, look.colour, label)
    for row in (row for row in methods.rows if row["method"] == OWN):
        entry = methods.summary.get(f"{key_of(row)}_over_cacheblend_points")
        if entry and row["run"] in runs:
            _dot(right, entry, runs.index(row["run"]), "o", METHODS[DROIDSPEAK].colour)
    left.axvline(1, color=COLOURS["floor"], linestyle=":", linewidth=1.2, label="no gain")
    right.axvline(0, color=COLOURS["floor"], linestyle=":", linewidth=1.2)
    left.set(xscale="log", xlabel="full prefill's time to first token / DroidSpeak's")
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 40) if tick <= 1.1 * max(r["gain"]["high"] for r in rows)]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.xaxis.set_minor_formatter("")
    right.set_xlabel("score of DroidSpeak above CacheBlend's\nat equal compute, points")
    left.set_yticks(range(len(runs)), runs)
    left.set_ylim(len(runs) - 0.5, -0.5)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return fig


def _dot(ax: Axes, entry: dict[str, Any], at: float, marker: str, colour: str, label: str | None = None) -> None:
    fill = "full" if marker == "o" else "none"
    ax.plot([entry["low"], entry["high"]], [at, at], color=colour, linewidth=1.8, alpha=0.7)
    ax.plot(entry["value"], at, marker, color=colour, markersize=8, fillstyle=fill, label=label)
