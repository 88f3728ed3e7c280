"""The figures of notebook 23: the reader's run over the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.study.overlay import name_results, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap
from firsttoken_studies.cps.online import POLICIES
from firsttoken_studies.cps.styles import POLICIES as LOOKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANGES = ("link slows 4 times at half", "link 8 times faster from half", "model 3 times larger from half")


def totals(recorded: Result | None, now: Result) -> Figure:
    """What each policy paid in each setting, over what the oracle paid, with intervals over sequences."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    named = list(_by_setting(results[0].result))
    fig, ax = plt.subplots(figsize=(9, 0.75 * len(named) + 1.4))
    for drawn in results:
        for setting, by_policy in _by_setting(drawn.result).items():
            for shift, name in enumerate(POLICIES[:-1]):
                at = named.index(setting) + 0.2 * (shift - 1.5) + drawn.shift / 4
                pairs = np.column_stack([by_policy[name], by_policy["oracle"]])
                paid = bootstrap(pairs, lambda sample: float(np.divide(*sample.sum(0)))).summary("x")
                label = LOOKS[name][0] if drawn.own and setting == named[0] else None
                drawn.point(ax, at, paid, name.replace("cross_", "cross-"), along="x", label=label)
    ax.axvline(1, color=COLOURS["floor"], linestyle=":", label="floor: the oracle")
    ax.set(xscale="log", xlabel="total recovery cost / the oracle's")
    ticks = (1, 1.25, 1.5, 2, 3, 5, 10, 20)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.set_minor_formatter("")
    ax.set_yticks(range(len(named)), named)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    ax.legend(loc="lower right")
    fig.suptitle("Each fixed policy costs more than twice the least somewhere, the learned one nowhere")
    name_results(fig, results, "recovery_x")
    return fig


def courses(recorded: Result | None, now: Result) -> Figure:
    """Regret as it grows in one sequence, where something changes at half of it."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    fig, axes = plt.subplots(1, len(CHANGES), figsize=(9, 3.9))
    for ax, setting in zip(axes, CHANGES, strict=True):
        for drawn in results:
            rows = [row for row in drawn.result.rows if row["what"] == "course" and row["setting"] == setting]
            count, ends_s = drawn.result.parameters["online"]["preemptions"], max(row["at_s"] for row in rows)
            for name in POLICIES[:-1]:
                mine = [row for row in rows if row["policy"] == name]
                regret = [{"value": 1e3 * row["regret_s"] / count} for row in mine]
                places = [100 * row["at_s"] / ends_s for row in mine]
                options = {"marker": "", "linewidth": 2.6 if drawn.own else 1.6}
                label = LOOKS[name][0] if drawn.own else None
                drawn.line(ax, places, regret, name.replace("cross_", "cross-"), label=label, **options)
        ax.axvline(50, color=COLOURS["mark"], linestyle=":")
        ax.set_title(setting, fontsize=10.5)
        ax.set_xlabel("of the sequence, %")
    axes[0].set_ylabel("regret against the oracle so far,\nms / preemptions in all")
    axes[1].legend(loc="upper left")
    fig.suptitle("After a change the learned policy pays for a few preemptions, then no more")
    name_results(fig, results)
    return fig


def one_change(courses: Mapping[str, np.ndarray], oracle: np.ndarray, times_s: Sequence[float], title: str) -> Figure:
    """The same of notebook 23's scene: what two policies and ``oracle`` have paid by ``times_s``, s. Axes and their few
    letters, which take longest to draw, are the same for every change."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 2.8), layout="none")
    fig.subplots_adjust(left=0.1, right=0.79, bottom=0.18, top=0.89)
    for (name, paid), side in zip(courses.items(), ("bottom", "top"), strict=True):
        colour, regret = COLOURS[name.replace("cross_", "cross-")], 1e3 * (paid - oracle)
        ax.step(times_s, regret, where="post", color=colour)
        ax.text(times_s[-1], regret[-1], f"  {LOOKS[name][0]}", color=colour, va=side)
    ax.axvline(times_s[len(times_s) // 2], color=COLOURS["mark"], linestyle=":")
    ax.set_title(title, fontsize="medium")
    ax.set(xlim=(0, 12), xticks=range(0, 13, 3), ylim=(-90, 900), yticks=range(0, 801, 400))
    ax.set(xlabel="time, s; the link changes at 6 s", ylabel="regret so far, ms")
    return fig


def setting_rows(result: Result) -> Rows:
    """The ratios by setting."""
    rows = []
    for best in result.summary.all("best_static"):
        line = {"setting": best["where"]["case"], "best static policy": LOOKS[best["value"]][0]}
        for name, label in (("best_static", "best static"), ("oracle", "oracle"), ("cross_point", "CrossPoint")):
            over = result.summary.of("recovery_x", policy="online", than=name, case=line["setting"])
            line[f"online / {label}"] = interval(over, 3)
        rows.append(line)
    return rows


def _by_setting(result: Result) -> dict[str, dict[str, np.ndarray]]:
    """setting -> policy -> seconds paid [seeds]."""
    rows = [row for row in result.rows if row["what"] == "total"]
    return {
        setting: {
            name: np.array([row["seconds"] for row in rows if row["setting"] == setting and row["policy"] == name])
            for name in POLICIES
        }
        for setting in dict.fromkeys(row["setting"] for row in rows)
    }
