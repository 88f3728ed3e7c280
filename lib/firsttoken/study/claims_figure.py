"""One picture of the ledger: each effect that was measured, as a share of the effect that the report has."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firsttoken.study import plot
from firsttoken.study.claims import Claim
from firsttoken.study.record import Result, pick
from firsttoken.study.verdicts import Verdict, effect, judge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = (-0.6, 3.0)  # of the report's effect; what lies beyond stands at the edge, with its number
_LOOKS = {Verdict.REPRODUCED: ("o", True), Verdict.TREND: ("o", False), Verdict.FAILED: ("X", True)}
_WIDTH = 62  # characters of a label's line
_Line = tuple[str, Verdict, tuple[float, float, float]]


def effects(claims: Sequence[Claim], results: Sequence[Result], machine: str) -> Figure:
    """Measured over reported effect, with its interval, for every measured claim of a report that has a no-effect
    value; a panel a report. What only another machine than ``machine`` has recorded is of that one, which is named.

    1 is the report's effect (or bound), 0 none. A filled dot is reproduced, a hollow one a trend, a cross neither.
    """
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    panels: dict[str, list[_Line]] = {}
    for claim in claims:
        own = pick(results, claim.experiment, claim.profiles, machine)
        result = own or pick(results, claim.experiment, claim.profiles, "any")
        judged = judge(claim, result)
        if result and judged.verdict in _LOOKS and claim.no_effect is not None and claim.nature == "measured":
            says = claim.says if own else f"{claim.says} (on {result.slug})"
            line = (says, judged.verdict, effect(claim, result.summary.of(claim.measure, **claim.places[0])))
            panels.setdefault(claim.report, []).append(line)
    counts = [len(lines) for lines in panels.values()]
    fig, axes = plt.subplots(
        len(panels), figsize=(9.5, 1.4 + 0.4 * sum(counts)), sharex=True, height_ratios=counts, squeeze=False
    )
    for ax, (report, lines) in zip(axes[:, 0], panels.items(), strict=True):
        _draw(ax, lines)
        ax.set_title(report, loc="left", fontsize=11, fontweight="bold")
    axes[-1, 0].set_xlabel("measured effect / the report's effect or bound; 0 is no effect")
    colour = plot.COLOURS["measured"]
    handles = [
        Line2D([], [], ls="", marker=marker, color=colour, markerfacecolor=colour if filled else "white", label=verdict)
        for verdict, (marker, filled) in _LOOKS.items()
    ]
    handles.append(Line2D([], [], color=plot.COLOURS["paper"], lw=6, alpha=0.5, label="the report"))
    fig.legend(handles=handles, loc="outside upper center", ncols=4)
    return fig


def _draw(ax: Axes, lines: Sequence[_Line]) -> None:
    ax.axvline(1, color=plot.COLOURS["paper"], lw=6, alpha=0.5, zorder=0)
    ax.axvline(0, color=plot.COLOURS["floor"], lw=1, zorder=0)
    colour = plot.COLOURS["measured"]
    for place, (_, verdict, (low, value, high)) in enumerate(lines):
        marker, filled = _LOOKS[verdict]
        ends = [min(max(end, _SHOWN[0]), _SHOWN[1]) for end in (low, high)]
        ax.plot(ends, [place] * 2, color=colour, lw=1.8, solid_capstyle="butt")
        inside = min(max(value, _SHOWN[0]), _SHOWN[1])
        face = colour if filled else "white"
        ax.plot(inside, place, marker, color=colour, markerfacecolor=face, markersize=7, clip_on=False)
        if inside != value:
            beside = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right", "va": "center", "fontsize": 9}
            ax.annotate(f"{value:.1f}", (inside, place), **beside)
    ax.set_yticks(
        range(len(lines)), [textwrap.fill(says, _WIDTH, break_on_hyphens=False) for says, *_ in lines], fontsize=8.5
    )
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.set_xlim(*_SHOWN)
    ax.grid(axis="y", visible=False)
