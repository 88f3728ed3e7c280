"""The figure and the table of notebook 60, drawn from a result alone."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.together.one_engine import ARRIVAL, LINK, MEASURED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (  # scene, unit, what is drawn by the rows' names, and the goal: so many times which
    (ARRIVAL, "ms", {"decode_s": "nobody prefills", "with_prompt_s": "beside a new prompt"}, 1.25, "with_prompt_s"),
    (LINK, "s", {"alone_s": "alone, pipelined", "beside_s": "beside those who run"}, 1.15, "alone_s"),
    (LINK, "ms", {"plain_tbt_s": "only decodes", "tbt_s": "while it comes"}, 1.25, "plain_tbt_s"),
)
_MORE = {"moving_s": "half of them move, median", "gap_s": "half of them move, longest"}
_TITLES = ("Gaps between tokens of those who stay", "First token of a stored prefix", "P99 between tokens of who runs")


def goals(result: Result) -> Figure:
    """Every round of the three scenes that are timed, their medians, and where the goal lies."""
    import matplotlib.pyplot as plt

    names = [drawn | (_MORE if place == 0 else {}) for place, (_, _, drawn, _, _) in enumerate(_PANELS)]
    fig, axes = plt.subplots(3, figsize=(9, 6), height_ratios=[len(drawn) + 1 for drawn in names])
    for ax, title, drawn, (scene, unit, _, times, base) in zip(axes, _TITLES, names, _PANELS, strict=True):
        _panel(ax, [row for row in result.rows if row["scene"] == scene], drawn, 1e3 if unit == "ms" else 1.0)
        measure, case = MEASURED[base]
        goal = times * result.summary.value(measure, case=case) * (1e3 if unit == "ms" else 1.0)
        ax.axvline(goal, color=COLOURS["target"], linestyle="--", linewidth=1.5, label=f"goal: {times:g} times")
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_xlabel(unit)
        ax.set_xlim(left=0)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=9, frameon=False, borderaxespad=0.1)
    return fig


def _panel(ax: Axes, rows: Rows, drawn: dict[str, str], scale: float) -> None:
    look = LOOKS["measured"]
    for place, name in enumerate(drawn):
        values = sorted(scale * row[name] for row in rows)
        ax.plot(values, [place] * len(values), look.marker, color=look.colour, alpha=0.45, markersize=6)
        ax.plot([median(values)] * 2, [place - 0.3, place + 0.3], color=look.colour, linewidth=2.5)
    ax.set_yticks(range(len(drawn)), list(drawn.values()))
    ax.set_ylim(len(drawn) - 0.5, -0.5)


def goal_rows(result: Result) -> Rows:
    """The ratios that the goals are of, with the seconds behind them."""
    found, config = result.summary, result.parameters["one_engine"]
    said = (
        ("longest gap / gap beside a prompt", "≤ 1.25", "longest_gap_x", "moving", "with_prompt"),
        ("median gap meanwhile / gap beside a prompt", "", "median_gap_x", "moving", "with_prompt"),
        ("stored prefix: first token in the engine / alone", "≤ 1.15", "ttft_x", "beside", "alone"),
        ("stored prefix: P99 between tokens / of plain steps", "≤ 1.25", "tbt_p99_x", "beside", "plain"),
        (f"prefills of a prompt that {config['sharing']} share", "1", "prefills", "shared", ""),
        ("the same, nothing shared", "", "prefills", "apart", ""),
        ("all first tokens, shared, s", "", "first_tokens_s", "shared", ""),
        ("all first tokens, nothing shared, s", "", "first_tokens_s", "apart", ""),
    )
    rows: Rows = []
    for what, goal, measure, case, than in said:
        place = {"case": case, "than": than} if than else {"case": case}
        rows.append({"measure": what, "goal": goal, "measured": interval(found.of(measure, **place), 2)})
    return rows
