"""One picture of the ledger: every claim of the reports, by how near to the report what was measured comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from firsttoken_studies.record import plot
from firsttoken_studies.record.claims import Claim, is_number
from firsttoken_studies.record.record_log import EMPTY, Log
from firsttoken_studies.record.results import Result
from firsttoken_studies.record.verdicts import Judgement, Verdict, judge_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = 8.0  # times better or worse than the report; what lies beyond stands at the edge
_LOOKS = {  # whose colour, the marker, and whether it is filled
    Verdict.REPRODUCED: ("measured", "o", True),
    Verdict.TREND: ("measured", "o", False),
    Verdict.DIFFERS: ("measured", "D", False),
    Verdict.FAILED: ("not reproduced", "X", True),
    Verdict.CONTRADICTED: ("other", "X", True),
    Verdict.TOO_FEW: ("other", ".", True),
    Verdict.NOT_RUN: ("other", ".", True),
}
_GROUNDS = {"live": "", "simulated": " *", "arithmetic": " °"}  # behind a claim's name
_COLUMNS = (("ProgressiveServe",), ("DroidSpeak", "CPS"), ("PETALS", "Sarathi-Serve"))


def effects(claims: Sequence[Claim], results: Sequence[Result], machine: str, log: Log = EMPTY) -> Figure:
    """Every claim of a report, a line each, sorted: how many times better (right) or worse (left) than the report.

    1 is the report's effect or bound. A claim without a size, an order or an equality, stands at 1 where it is
    reproduced, at one half where it is a trend, and else at the left edge. ``machine`` is the one that answers first
    (``judge_record``).
    """
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    judged = judge_record(
        [claim for claim in claims if claim.whose == "report" and not claim.counts_as], results, machine, log
    )
    columns = [[(name, _lines(judged, name)) for name in names] for names in _COLUMNS]
    tallest = max(sum(len(lines) + 2 for _, lines in column) for column in columns)
    fig = plt.figure(figsize=(13, 0.9 + 0.2 * tallest))
    grid = fig.add_gridspec(1, len(columns))
    for index, column in enumerate(columns):
        heights = [len(lines) + 2 for _, lines in column]
        rest = max(tallest - sum(heights), 0.01)
        inner = grid[index].subgridspec(len(column) + 1, 1, height_ratios=[*heights, rest])
        for row, (name, lines) in enumerate(column):
            ax = fig.add_subplot(inner[row])
            _draw(ax, lines)
            ax.set_title(f"{name}: {_counted(lines)}", loc="left", fontsize=9.5, fontweight="bold")
            if row == len(column) - 1:
                ax.set_xlabel("times better than the report", fontsize=9)
    handles = [Line2D([], [], ls="", label=verdict, **_marker(verdict)) for verdict in _LOOKS if verdict.judged]
    handles.append(Line2D([], [], ls="", label="not judged", **_marker(Verdict.NOT_RUN)))
    handles.append(Line2D([], [], color=plot.COLOURS["paper"], lw=5, alpha=0.5, label="the report"))
    handles += [Line2D([], [], ls="", label="* simulated or replayed"), Line2D([], [], ls="", label="° arithmetic")]
    fig.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8.5, handletextpad=0.2)
    return fig


_Line = tuple[Judgement, float]


def _lines(judged: Sequence[Judgement], report: str) -> list[_Line]:
    order = list(_LOOKS)
    lines = [(judgement, _better(judgement)) for judgement in judged if judgement.claim.report == report]
    return sorted(lines, key=lambda line: (order.index(line[0].verdict), -line[1]))


def _counted(lines: Sequence[_Line]) -> str:
    reproduced = sum(judgement.verdict == Verdict.REPRODUCED for judgement, _ in lines)
    return f"{reproduced} of {len(lines)} reproduced"


def _better(judged: Judgement) -> float:
    """Return the ratio to the report's effect, above 1 where better: 1 as the report has it, 0 no effect or nothing to
    compare."""
    claim, share = judged.claim, judged.share
    if not judged.verdict.judged:
        return 0.0
    if share is None:
        if claim.kind == "bound" and judged.value is not None and is_number(claim.value) and claim.value:
            share = judged.value / claim.value  # of a bound below zero, a loss, more is worse
            return share if (claim.op == ">=") == (claim.value > 0) else _inverse(share)
        return {Verdict.REPRODUCED: 1.0, Verdict.TREND: 0.5}.get(judged.verdict, 0.0)
    if claim.effect == "cost":
        return _inverse(share)
    return min(share, _inverse(share)) if claim.effect == "finding" and claim.kind == "ratio" else share


def _inverse(share: float) -> float:
    return 1 / share if share > 0 else _SHOWN


def _marker(verdict: Verdict) -> dict[str, Any]:
    whose, marker, filled = _LOOKS[verdict]
    colour = plot.COLOURS[whose]
    return {"marker": marker, "color": colour, "markerfacecolor": colour if filled else "white"}


def _draw(ax: Axes, lines: Sequence[_Line]) -> None:
    ax.axvline(1, color=plot.COLOURS["paper"], lw=5, alpha=0.5, zorder=0)
    for row, (judged, better) in enumerate(lines):
        look, inside = _marker(judged.verdict), min(max(better, 1 / _SHOWN), _SHOWN)
        ax.plot([1, inside], [row] * 2, color=look["color"], lw=1, alpha=0.6)
        ax.plot(inside, row, ls="", markersize=5, clip_on=False, **look)
    names = [f"{judgement.claim.id.partition('.')[2]}{_GROUNDS[judgement.claim.stands_on]}" for judgement, _ in lines]
    ax.set_yticks(range(len(lines)), names, fontsize=8)
    ax.set_ylim(len(lines) - 0.4, -0.6)
    ax.set_xscale("log", base=2)
    ax.set_xlim(1 / _SHOWN, _SHOWN)
    ticks = [2.0**power for power in range(-int(math.log2(_SHOWN)), int(math.log2(_SHOWN)) + 1)]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    ax.grid(axis="y", visible=False)
