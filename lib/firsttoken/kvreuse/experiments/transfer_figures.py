"""The figures and tables of notebook 34, from a result of profile_transfer alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.kvreuse.experiments.profiling import BOUND
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.kvreuse.experiments.transfer import AT_BOUND, OF_SIZE, SEEN, is_foreign, over_own
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import Interval, bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_WORST, PAPER_MEAN = 4, 2  # points, 5.4
# Tol's bright and light schemes; none is a colour of paper, measured, floor or a method
_TASKS = {"qa": ("#4477AA", "o"), "lead": ("#CCBB44", "s"), "copy": ("#EE6677", "^")}
_OTHERS = (("#66CCEE", "D"), ("#228833", "v"), ("#AA3377", "P"))


def differences(result: Result) -> Figure:
    """Left: what a choice loses, by where it was made. Right: what a foreign one loses more than the task's own."""
    import matplotlib.pyplot as plt

    pairs = _pairs(result)
    cells = [(pair, task) for pair, tasks in pairs.items() for task in tasks]
    fig, (left, right) = plt.subplots(1, 2, figsize=(11.5, 0.72 * len(cells) + 2.1), sharey=True)
    looks = _looks(result)
    for place, (pair, judged) in enumerate(cells):
        rows = [row for row in _transfers(result, AT_BOUND) if (_pair(row), row["judged_on"]) == (pair, judged)]
        for step, row in enumerate(sorted(rows, key=lambda r: (r["chosen_on"] != SEEN, is_foreign(r)))):
            at = place + 0.2 * (step - (len(rows) - 1) / 2)
            colour, marker, filled = _mark(row, looks)
            _dot(left, bootstrap(row["item_loss"]), at, colour, marker, filled)
            if row["chosen_on"] != judged:
                _dot(right, bootstrap(over_own(result.rows, row)), at, colour, marker, filled)
    for value, style, label in ((PAPER_MEAN, "-", "paper: mean"), (PAPER_WORST, "--", "paper: at most")):
        right.axvline(value, color=COLOURS["paper"], linestyle=style, linewidth=2, label=label)
    for ax in (left, right):
        ax.axvline(0, color=COLOURS["floor"], linestyle=":", linewidth=1.2)
        ax.grid(axis="y", visible=False)
    for (colour, marker), task in ((look, task) for task, look in looks.items()):
        right.plot([], [], marker, color=colour, markersize=8, label=f"chosen on {task}")
    right.plot([], [], "o", color=COLOURS["floor"], fillstyle="none", markersize=8, label=f"chosen on {SEEN} (floor)")
    left.set_xlabel("loss of token accuracy where it is used, points")
    right.set_xlabel("more than the task's own choice, points")
    left.set_yticks(range(len(cells)), [f"{pair}\nused on {task}" for pair, task in cells])
    left.set_ylim(len(cells) - 0.4, -0.6)
    fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return fig


def frontiers(result: Result) -> Figure:
    """Figure 17: loss by the number of layers recomputed, the group of each size chosen on this task or another."""
    import matplotlib.pyplot as plt

    pairs = {pair: tasks for pair, tasks in _pairs(result).items() if len(tasks) > 1} or _pairs(result)
    cells = [(pair, task) for pair, tasks in pairs.items() for task in tasks]
    fig, axes = plt.subplots(1, len(cells), figsize=(3.9 * max(len(cells), 1.4) + 0.4, 4.4), squeeze=False)
    looks = _looks(result)
    for ax, (pair, judged) in zip(axes[0], cells, strict=True):
        rows = [row for row in _transfers(result, OF_SIZE) if (_pair(row), row["judged_on"]) == (pair, judged)]
        for chosen_on in dict.fromkeys(row["chosen_on"] for row in rows):
            line = sorted((row["layers"], row["item_loss"]) for row in rows if row["chosen_on"] == chosen_on)
            layers, each = [at for at, _ in line], [bootstrap(losses) for _, losses in line]
            middle = [100 * interval.estimate for interval in each]
            if chosen_on == SEEN:
                ax.plot(layers, middle, ":", color=COLOURS["floor"], label=f"{SEEN} (floor)")
                continue
            colour, marker = looks[chosen_on]
            own = chosen_on == judged
            label = f"{chosen_on}, other items" if own else chosen_on
            ax.plot(layers, middle, marker, linestyle="-" if own else "--", color=colour, label=label, markersize=4.5)
            if own:
                low, high = ([100 * getattr(i, end) for i in each] for end in ("low", "high"))
                ax.fill_between(layers, low, high, color=colour, alpha=0.2, linewidth=0)
        ax.axhline(0, color=COLOURS["floor"], linewidth=0.8)
        ax.set_title(f"{pair}, used on {judged}", fontsize=11)
        ax.set_xlabel("layers recomputed")
        ax.legend(title="group chosen on", fontsize=8.5, title_fontsize=9)
    axes[0][0].set_ylabel("loss of token accuracy, points")
    return fig


def stability(result: Result) -> Figure:
    """Left: how many layers a sample of so many items chooses. Right: what its choices lose elsewhere, on average."""
    import matplotlib.pyplot as plt

    rows = [row for row in result.rows if row["what"] == "choice"]
    runs = list(dict.fromkeys((_pair(row), row["chosen_on"]) for row in rows))
    sizes = sorted({row["items"] for row in rows})
    fig, (left, right) = plt.subplots(1, 2, figsize=(11.5, 0.62 * len(runs) + 1.9), sharey=True)
    for place, (pair, task) in enumerate(runs):
        for step, items in enumerate(sizes):
            of = [r for r in rows if (_pair(r), r["chosen_on"], r["items"]) == (pair, task, items)]
            at = place + 0.22 * (step - (len(sizes) - 1) / 2)
            shade = 0.35 + 0.65 * step / max(1, len(sizes) - 1)
            layers = [row["layers"] for row in of]
            low, middle, high = np.percentile(layers, [2.5, 50, 97.5])
            colour, label = METHODS["DroidSpeak"].colour, f"{items} items" if place == 0 else None
            left.plot([low, high], [at, at], color=colour, alpha=shade, linewidth=2)
            left.plot(middle, at, "o", color=colour, alpha=shade, markersize=7, label=label)
            lost = bootstrap([row["relative_loss"] for row in of])
            right.plot([100 * lost.low, 100 * lost.high], [at, at], color=colour, alpha=shade, linewidth=2)
            right.plot(100 * lost.estimate, at, "o", color=colour, alpha=shade, markersize=7)
    left.set_xlabel(f"layers that a sample chooses at the {100 * BOUND:g} % bound\n(median, 95 % of samples)")
    right.axvline(100 * BOUND, color=COLOURS["paper"], linestyle="--", linewidth=2)
    right.annotate("the bound", (100 * BOUND, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    right.axvline(0, color=COLOURS["floor"], linestyle=":", linewidth=1.2)
    right.set_xlabel("loss on the items not drawn, % of the own score\n(mean of samples)")
    left.set_xlim(left=-0.5)
    left.set_yticks(range(len(runs)), [f"{pair}: {task}" for pair, task in runs])
    left.set_ylim(len(runs) - 0.5, -0.5)
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(sizes), fontsize=9)
    return fig


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
    for name, entry in result.summary.items():
        if name.endswith("_over_own_points") and not name.startswith("same_size_"):
            what = name.removesuffix("_over_own_points")
            paper = {"worst": f"at most {PAPER_WORST}", "mean": str(PAPER_MEAN)}.get(what, "")
            rows.append(
                {
                    "transfer": what.replace("_", " "),
                    "at the bound, points": interval(entry),
                    "equally many layers, points": interval(result.summary.get(f"same_size_{name}")),
                    "paper, points": paper,
                    "n": entry["n"],
                }
            )
    return rows


def unseen_rows(result: Result) -> Rows:
    """What a choice loses more on other items of its own task than on those that made it."""
    return [
        {"choice": name.removesuffix("_unseen_points").replace("_", " "), "points": interval(entry), "n": entry["n"]}
        for name, entry in result.summary.items()
        if name.endswith("_unseen_points")
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


def _pair(row: dict[str, Any]) -> str:
    return f"{row['receiver']} <- {row['sender']}"


def _pairs(result: Result) -> dict[str, list[str]]:
    """The tasks of each pair."""
    found: dict[str, list[str]] = {}
    for row in _transfers(result, AT_BOUND):
        if row["chosen_on"] == SEEN:
            found.setdefault(_pair(row), []).append(row["judged_on"])
    return found


def _looks(result: Result) -> dict[str, tuple[str, str]]:
    """Colour and marker of each task."""
    tasks = dict.fromkeys(task for tasks in _pairs(result).values() for task in tasks)
    others = iter(_OTHERS * len(tasks))
    return {task: _TASKS.get(task) or next(others) for task in tasks}


def _mark(row: dict[str, Any], looks: dict[str, tuple[str, str]]) -> tuple[str, str, bool]:
    """Colour, marker, and whether filled: hollow black where the choice was made on the very items that judge it."""
    if row["chosen_on"] == SEEN:
        return COLOURS["floor"], "o", False
    return *looks[row["chosen_on"]], True


def _dot(ax: Axes, found: Interval, at: float, colour: str, marker: str, filled: bool) -> None:
    ax.plot([100 * found.low, 100 * found.high], [at, at], color=colour, linewidth=1.8, alpha=0.8)
    ax.plot(100 * found.estimate, at, marker, color=colour, markersize=7, fillstyle="full" if filled else "none")
