"""The figures and tables of notebook 34, from a result of profile_transfer alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.study.measures import Scalar
from firsttoken.study.overlay import Drawn, name_results, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.profiling import BOUND
from firsttoken_studies.droidspeak.styles import METHODS
from firsttoken_studies.droidspeak.transfer import AT_BOUND, OF_SIZE, OWN, SEEN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_WORST, PAPER_MEAN = 4, 2  # points, 5.4


def differences(recorded: Result, now: Result) -> Figure:
    """What a choice made on another task loses more than the task's own: at the bound, and with equally many layers."""
    import matplotlib.pyplot as plt

    rules = {AT_BOUND: ("smallest group within the bound, as chosen there", "o"), OF_SIZE: ("equally many layers", "s")}
    of_bound, both = {"variant": AT_BOUND, "than": OWN}, over(recorded, now)
    found = [entry for one in both for entry in one.result.summary.all("loss_points", **of_bound)]
    places = [entry["where"] for entry in found if "across" not in entry["where"]] + [of_bound | {"across": "mean"}]
    shown = [where for index, where in enumerate(places) if where not in places[:index]]
    fig, ax = plt.subplots(figsize=(9, 0.5 * len(shown) + 2.4))
    colour = METHODS["DroidSpeak"].colour
    for shift, (rule, (label, marker)) in zip((-0.14, 0.14), rules.items(), strict=True):
        fill = "none" if rule == OF_SIZE else "full"
        for one in both:
            for line, where in enumerate(shown):
                if entry := one.result.summary.get("loss_points", **where | {"variant": rule}):
                    at = line + shift + one.shift / 3
                    edge = {"markeredgecolor": "black"} if one.own and fill == "full" else {}
                    ax.plot([entry["low"], entry["high"]], [at, at], color=colour, linewidth=1.8, **one.style)
                    ax.plot(entry["value"], at, marker, color=colour, markersize=7, fillstyle=fill, **edge, **one.style)
        ax.plot([], [], marker, color=colour, fillstyle=fill, label=label)
    for value, style, label in ((PAPER_MEAN, "-", "paper: mean"), (PAPER_WORST, "--", "paper: at most")):
        ax.axvline(value, color=COLOURS["paper"], linestyle=style, linewidth=2, label=label)
    ax.axvline(0, color=COLOURS["mark"], linestyle=":", linewidth=1.2)
    ax.set_yticks(range(len(shown)), [_told(where) for where in shown])
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlabel("token accuracy lost beyond the task's own choice, points (95 %)")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="center right", fontsize=9)
    fig.suptitle("Which layers to recompute carries over to another task; how many does not")
    name_results(fig, both, "loss_points")
    return fig


def stability(recorded: Result, now: Result) -> Figure:
    """Left: how many layers a sample of so many items chooses. Right: what its choices lose elsewhere, on average."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    both = over(recorded, now)
    choices = [(one, [row for row in one.result.rows if row["what"] == "choice"]) for one in both]
    rows = [row for _, of_run in choices for row in of_run]
    runs = list(dict.fromkeys((_pair(row), row["chosen_on"]) for row in rows))
    sizes = sorted({row["items"] for row in rows})
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 0.62 * len(runs) + 2.6), sharey=True)
    for place, (pair, task) in enumerate(runs):
        for step, items in enumerate(sizes):
            at = place + 0.8 / len(sizes) * (step - (len(sizes) - 1) / 2)
            for one, of_run in choices:
                of = [r for r in of_run if (_pair(r), r["chosen_on"], r["items"]) == (pair, task, items)]
                if of:
                    _sample(left, right, at, of, one, 0.4 + 0.6 * step / max(1, len(sizes) - 1))
    left.set_xlabel(f"layers that a sample chooses at the {100 * BOUND:g} % bound\n(median, 95 % of samples)")
    right.axvline(100 * BOUND, color=COLOURS["paper"], linestyle="--", linewidth=2)
    right.annotate("the bound", (100 * BOUND, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    right.axvline(0, color=COLOURS["mark"], linestyle=":", linewidth=1.2)
    right.set_xlabel("loss on the items not drawn, % of the own score\n(mean of samples)")
    left.set_xlim(left=-0.5)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_yticks(range(len(runs)), [f"{pair}: {task}" for pair, task in runs])
    left.set_ylim(len(runs) - 0.5, -0.5)
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
    told = ", ".join(map(str, sizes))
    fig.suptitle(f"Samples of {told} items, from top to bottom: larger ones agree on a group")
    name_results(fig, both)
    return fig


def _sample(left: Axes, right: Axes, at: float, rows: Rows, one: Drawn, shade: float) -> None:
    """What choices by samples of one size have in common; small samples are lighter."""
    colour, edge = METHODS["DroidSpeak"].colour, {"markeredgecolor": "black"} if one.own else {}
    style = one.style | {"color": colour, "alpha": shade * one.style["alpha"]}
    low, middle, high = np.percentile([row["layers"] for row in rows], [2.5, 50, 97.5])
    lost = bootstrap([row["relative_loss"] for row in rows])
    drawn = ((left, low, middle, high), (right, 100 * lost.low, 100 * lost.estimate, 100 * lost.high))
    for ax, first, value, last in drawn:
        ax.plot([first, last], [at, at], linewidth=2, **style)
        ax.plot(value, at, "o", markersize=7, **edge, **style)


def matrix_rows(result: Result) -> Rows:
    """The matrix of losses: where a choice was made, where it is used; points, with the group chosen most often."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in _transfers(result, AT_BOUND):
        line = lines.setdefault((_pair(row), row["chosen_on"]), {"pair": _pair(row), "chosen on": row["chosen_on"]})
        loss = bootstrap(row["item_loss"]).summary("points", 100)
        line[f"used on {row['judged_on']}"] = f"{interval(loss)}, mostly {row['group']}"
    return list(lines.values())


def difference_rows(result: Result) -> Rows:
    """What a foreign choice loses more than the task's own: at the bound, and at equal size averaged over the sizes."""
    rows = []
    papers = {"worst": f"at most {PAPER_WORST}", "mean": str(PAPER_MEAN)}
    for entry in result.summary.all("loss_points", variant=AT_BOUND, than=OWN):
        where = entry["where"]
        across = where.get("across")
        same_size = result.summary.get("loss_points", **where | {"variant": OF_SIZE})
        rows.append(
            {
                "transfer": across or f"{_choice(where)} to {where['task']}",
                "at the bound, points": interval(entry),
                "equally many layers, points": interval(same_size),
                "paper, points": papers.get(across, ""),
                "n": entry["n"],
            }
        )
    return rows


def unseen_rows(result: Result) -> Rows:
    """What a choice loses more on other items of its own task than on those that made it."""
    return [
        {"choice": _choice(entry["where"]), "points": interval(entry), "n": entry["n"]}
        for entry in result.summary.all("loss_points", than=SEEN)
    ]


def elsewhere(result: Result) -> dict[str, list[float]]:
    """By run: the mean relative loss of choices on items not drawn, from samples of few items to many."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in result.rows:
        if row["what"] == "choice":
            sizes = found.setdefault(f"{_pair(row)}: {row['chosen_on']}", {})
            sizes.setdefault(row["items"], []).append(row["relative_loss"])
    return {run: [sum(of) / len(of) for _, of in sorted(sizes.items())] for run, sizes in found.items()}


def _transfers(result: Result, rule: str) -> Rows:
    return [row for row in result.rows if row["what"] == "transfer" and row["rule"] == rule]


def _pair(row: Mapping[str, Scalar]) -> str:
    return f"{row['receiver']} <- {row['sender']}"


def _choice(where: Mapping[str, Scalar]) -> str:
    return f"{where['receiver']} from {where['sender']} {where['chosen_on']}"


def _told(where: Mapping[str, Scalar]) -> str:
    """A transfer in words, or what stands for several."""
    across = where.get("across")
    return across or f"{_pair(where)}: chosen on {where['chosen_on']}, used on {where['task']}"
