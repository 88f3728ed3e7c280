"""How long each method computes, and partial prefill against its share of a full one, in notebook 33."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.study.overlay import Drawn, legend, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken_studies.droidspeak.latency import over_share
from firsttoken_studies.droidspeak.methods import DROIDSPEAK, OWN
from firsttoken_studies.droidspeak.styles import METHODS, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET = 1.10  # of (k + first token) / L
SHARE = COLOURS["mark"]  # the line of what is in proportion


def partial_times(recorded: Result | None, now: Result) -> Figure:
    """Left: the time by the share that is computed. Right: partial prefill over that share of a full prefill.

    The share is a measure, not a floor: a round's full prefill may be slower than its partial ones.
    """
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.8))
    lengths = sorted({row["tokens"] for one in drawn for row in one.result.rows})
    for one in drawn:
        edge = {"markeredgecolor": "black"} if one.own and not one.alone else {}
        there = sorted({row["tokens"] for row in one.result.rows})
        _times(left, [row for row in one.result.rows if row["tokens"] == there[-1]], one, f"{there[-1]:,}")
        for tokens in there:
            over_it = over_share([row for row in one.result.rows if row["tokens"] == tokens])
            shares = [100 * share for share in over_it]
            low, middle, high = np.array([[found.low, found.estimate, found.high] for found in over_it.values()]).T
            right.errorbar(shares, middle, [middle - low, high - middle], marker="os^Dv"[lengths.index(tokens)],
                           color=METHODS[DROIDSPEAK].colour, capsize=2, **edge, **one.style)  # fmt: skip
    for tokens, marker in zip(lengths, "os^Dv", strict=False):
        right.plot([], [], marker, color=METHODS[DROIDSPEAK].colour, label=f"{tokens:,} tokens")
    right.axhline(TARGET, color=COLOURS["target"], linestyle="--", label=f"target: at most {TARGET:.2f}")
    right.axhline(1, color=SHARE, linewidth=1.2)
    right.set(xlabel="layers recomputed, % of all", ylabel="partial prefill / its share of a full one")
    right.set_xlim(-3, 103)
    right.legend(fontsize=9)
    left.set(xlabel="computed, % of a prefill's token-layers", ylabel="time to first token, s")
    left.set_ylim(bottom=0)
    legend(fig, left, drawn, "ttft_x", columns=4)
    fig.suptitle("Partial prefill costs its share of a full one", fontsize=12)
    return fig


def _times(ax: Axes, rows: Rows, one: Drawn, tokens: str) -> None:
    edge = {"markeredgecolor": "black"} if one.own and not one.alone else {}
    by: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        by.setdefault(row["method"], {}).setdefault(row["compute"], []).append(row["first_token_s"])
    for name, line in by.items():
        points = sorted((100 * share, float(np.median(times))) for share, times in line.items())
        look = style_of(name)
        ax.plot(*zip(*points, strict=True), f"{look.marker}-", color=look.colour, **edge, **one.style)
        known = ax.get_legend_handles_labels()[1]
        if look.label not in known:
            ax.plot([], [], f"{look.marker}-", color=look.colour, label=look.label)
    full = [row for row in rows if row["method"] == OWN]
    prefill, first = (
        float(np.median(v))
        for v in ([r["prefill_s"] for r in full], [r["first_token_s"] - r["prefill_s"] for r in full])
    )
    in_share = {} if "in proportion" in ax.get_legend_handles_labels()[1] else {"label": "in proportion"}
    ax.plot([0, 100], [first, prefill + first], color=SHARE, linewidth=1.2, **(one.style | {"zorder": 1}), **in_share)
    ax.annotate(f"{tokens} tokens", (100, prefill + first), ha="right", va="bottom", fontsize=9)
