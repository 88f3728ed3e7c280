"""One picture of the ledger: each effect that was measured, as a share of the effect that the report has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from firsttoken.study import plot
from firsttoken.study.claims import Claim
from firsttoken.study.record import Result, pick
from firsttoken.study.verdicts import Verdict, effect, judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = (-0.6, 3.0)  # of the report's effect; what lies beyond stands at the edge, with its number
_LOOKS = {Verdict.REPRODUCED: ("o", True), Verdict.TREND: ("o", False), Verdict.FAILED: ("X", True)}


def effects(claims: Sequence[Claim], results: Sequence[Result], machine: str) -> Figure:
    """Measured over reported effect, with its interval, for every claim that has a no-effect value; by report.

    1 is the report's effect, 0 none. A filled dot is reproduced, a hollow one a trend, a cross neither.
    """
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    lines = []
    for claim in (claim for claim in claims if claim.no_effect is not None and claim.whose == "report"):
        result = pick(results, claim.experiment, claim.profiles, machine)
        judged = judge(claim, result)
        if judged.verdict != Verdict.NOT_RUN and claim.nature == "measured":
            lines.append((claim, judged.verdict, effect(claim, result.summary[claim.measures[0]])))
    fig, ax = plt.subplots(figsize=(9, 1.1 + 0.36 * len(lines)))
    ax.axvline(1, color=plot.COLOURS["paper"], lw=6, alpha=0.5, zorder=0)
    ax.axvline(0, color=plot.COLOURS["floor"], lw=1, zorder=0)
    for place, (_, verdict, (low, value, high)) in enumerate(lines):
        marker, filled = _LOOKS[verdict]
        colour = plot.COLOURS["measured"]
        ends = [min(max(end, _SHOWN[0]), _SHOWN[1]) for end in (low, high)]
        ax.plot(ends, [place] * 2, color=colour, lw=1.8, solid_capstyle="butt")
        inside = min(max(value, _SHOWN[0]), _SHOWN[1])
        face = colour if filled else "white"
        ax.plot(inside, place, marker, color=colour, markerfacecolor=face, markersize=7, clip_on=False)
        if inside != value:
            beside = {"xytext": (-6, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
            ax.annotate(f"{value:.1f}", (inside, place), **beside)
    ax.set_yticks(range(len(lines)), [f"{claim.says} ({claim.report})" for claim, *_ in lines], fontsize=9)
    ax.set_ylim(len(lines) - 0.4, -0.6)
    ax.set_xlim(*_SHOWN)
    ax.set_xlabel("measured effect / the report's effect (0: no effect)")
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], ls="", marker=marker, color=plot.COLOURS["measured"], label=str(verdict), markersize=7)
        for verdict, (marker, _) in _LOOKS.items()
    ]
    handles[1].set_markerfacecolor("white")
    handles.append(Line2D([], [], color=plot.COLOURS["paper"], lw=6, alpha=0.5, label="the report"))
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.2, 1.0), ncols=4)
    return fig
