"""The figures of notebook 23."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.crosspoint.experiments.online import POLICIES
from firsttoken.crosspoint.experiments.styles import POLICIES as LOOKS
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANGES = ("link slows 4 times at half", "link 8 times faster from half", "model 3 times larger from half")


def totals(result: Result) -> Figure:
    """What each policy paid in each setting, over what the oracle paid; dots are seeds."""
    import matplotlib.pyplot as plt

    paid = _by_setting(result)
    fig, ax = plt.subplots(figsize=(10, 0.62 * len(paid) + 1.6))
    rng = np.random.default_rng(0)
    for place, by_policy in enumerate(paid.values()):
        for shift, name in enumerate(POLICIES[:-1]):
            label, colour, marker = LOOKS[name]
            at = place + 0.2 * (shift - 1.5)
            over = by_policy[name] / by_policy["oracle"]
            ax.plot(over, at + rng.uniform(-0.05, 0.05, len(over)), ".", color=colour, alpha=0.35, markersize=3)
            ax.plot(over.mean(), at, marker, color=colour, markersize=8, label=None if place else label)
    ax.axvline(1, color=COLOURS["floor"], linestyle=":", label="Oracle")
    ax.set(xscale="log", xlabel="total recovery cost / the oracle's")
    ticks = (1, 1.25, 1.5, 2, 3, 5, 10, 20)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.set_minor_formatter("")
    ax.set_yticks(range(len(paid)), list(paid))
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    return fig


def courses(result: Result) -> Figure:
    """Regret as it grows in one sequence, where something changes at half of it."""
    import matplotlib.pyplot as plt

    rows = [row for row in result.rows if row["what"] == "course"]
    fig, axes = plt.subplots(1, len(CHANGES), figsize=(12, 3.4))
    for ax, setting in zip(axes, CHANGES, strict=True):
        for name in POLICIES[:-1]:
            label, colour, _ = LOOKS[name]
            mine = [row for row in rows if row["setting"] == setting and row["policy"] == name]
            times = [row["at_s"] for row in mine]
            ax.plot(times, [row["regret_s"] for row in mine], color=colour, label=label)
        ax.axvline(max(times) / 2, color=COLOURS["paper"], linestyle=":")
        ax.set(title=setting, xlabel="time, s")
    axes[0].set_ylabel("regret against the oracle, s")
    axes[0].legend(fontsize=9)
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
