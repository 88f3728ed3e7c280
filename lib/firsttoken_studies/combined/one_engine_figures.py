"""The figure and the table of notebook 60, drawn from a result alone."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from firsttoken.study.overlay import Drawn, name_results, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken_studies.combined.one_engine import ARRIVAL, LINK, MEASURED

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


def goals(recorded: Result, now: Result) -> Figure:
    """Every round of the three scenes that are timed, their medians, and where the goal lies: the reader's run over the
    record, each beside its own goal."""
    import matplotlib.pyplot as plt

    names = [drawn | (_MORE if place == 0 else {}) for place, (_, _, drawn, _, _) in enumerate(_PANELS)]
    fig, axes = plt.subplots(3, figsize=(9, 7), height_ratios=[len(drawn) + 1 for drawn in names])
    both = over(recorded, now)
    for ax, title, drawn, (scene, unit, _, times, base) in zip(axes, _TITLES, names, _PANELS, strict=True):
        measure, case = MEASURED[base]
        for one in both:
            scale = 1e3 if unit == "ms" else 1.0
            _panel(ax, one, [row for row in one.result.rows if row["scene"] == scene], drawn, scale)
            goal, label = times * one.result.summary.value(measure, case=case) * scale, f"goal: {times:g} times"
            style = one.style | {"color": COLOURS["target"], "linestyle": "--", "linewidth": 1.5}
            ax.axvline(goal, **style, label=label if one.own else None)
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_xlabel(unit)
        ax.set_xlim(left=0)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=9, frameon=False, borderaxespad=0.1)
    fig.suptitle("Who runs feels a stage as a new prompt, and a stored prefix more than that")
    name_results(fig, both)
    return fig


def _panel(ax: Axes, one: Drawn, rows: Rows, drawn: dict[str, str], scale: float) -> None:
    look = LOOKS["measured"]
    for place, name in enumerate(drawn):
        values, at = sorted(scale * row[name] for row in rows), place + one.shift
        edge = {"markeredgecolor": "black"} if one.own else {}
        ax.plot(values, [at] * len(values), look.marker, color=look.colour, markersize=6, **edge, **one.style)
        ax.plot([median(values)] * 2, [at - 0.2, at + 0.2], color=look.colour, linewidth=2.5, **one.style)
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
