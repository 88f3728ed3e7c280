"""How long each method computes, and partial prefill against its share of a full one, in notebook 33."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.kvreuse.experiments.latency import over_share
from firsttoken.kvreuse.experiments.methods import DROIDSPEAK, OWN
from firsttoken.kvreuse.experiments.styles import METHODS, style_of
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET = 1.10  # of (k + first token) / L
SHARE = COLOURS["mark"]  # the line of what is in proportion


def partial_times(latency: Result) -> Figure:
    """Left: the time by the share that is computed. Right: partial prefill over that share of a full prefill.

    The share is a measure, not a floor: a round's full prefill may be slower than its partial ones.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.3))
    lengths = sorted({row["tokens"] for row in latency.rows})
    _times(left, [row for row in latency.rows if row["tokens"] == lengths[0]])
    rounds = 1 + max(row["round"] for row in latency.rows)
    left.set_title(f"{lengths[0]:,} tokens, medians of {rounds} rounds")
    right.set_title(f"medians and 95 % of {rounds} rounds")
    for tokens, marker in zip(lengths, "os^Dv", strict=False):
        over = over_share([row for row in latency.rows if row["tokens"] == tokens])
        shares = [100 * share for share in over]
        low, middle, high = np.array([[found.low, found.estimate, found.high] for found in over.values()]).T
        right.errorbar(
            shares,
            middle,
            [middle - low, high - middle],
            marker=marker,
            color=METHODS[DROIDSPEAK].colour,
            alpha=1 if tokens == lengths[0] else 0.55,
            label=f"{tokens:,} tokens",
            capsize=2,
        )
    right.axhline(TARGET, color=COLOURS["target"], linestyle="--", label=f"target: at most {TARGET:.2f}")
    right.axhline(1, color=SHARE, linewidth=1.2, label="in proportion to a full prefill")
    right.set(xlabel="layers recomputed, % of all", ylabel="partial prefill / (k / L of a full one\n+ first token)")
    right.set_xlim(-3, 103)
    bottom, top = right.get_ylim()
    right.set_ylim(bottom, top + 0.45 * (top - bottom))  # room for the legend
    right.legend(fontsize=9, loc="upper right")
    return fig


def _times(ax: Axes, rows: Rows) -> None:
    by: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        by.setdefault(row["method"], {}).setdefault(row["compute"], []).append(row["first_token_s"])
    for name, line in by.items():
        points = sorted((100 * share, float(np.median(times))) for share, times in line.items())
        look = style_of(name)
        ax.plot(*zip(*points, strict=True), f"{look.marker}-", color=look.colour, label=look.label)
    full = [row for row in rows if row["method"] == OWN]
    prefill, first = (
        float(np.median(v))
        for v in ([r["prefill_s"] for r in full], [r["first_token_s"] - r["prefill_s"] for r in full])
    )
    ax.plot([0, 100], [first, prefill + first], color=SHARE, linewidth=1.2, zorder=1, label="in proportion to it")
    ax.set(xlabel="computed, % of a prefill's token-layers", ylabel="time to first token, s")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=9)
