"""The figure and the table of notebook 35 about a group for this link, from results of adaptive_group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.droidspeak.prefill import Group
from firsttoken.study.measures import Entry
from firsttoken.study.overlay import Drawn, legend, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET = 1.05  # of the best fixed group


def choices(recorded: Result | None, now: Result) -> Figure:
    """Left: TTFT of every group by bandwidth, and of the choice. Right: the choice over the best fixed group."""
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    fig, (times, ratios) = plt.subplots(1, 2, figsize=(9, 4.6), width_ratios=(1.5, 1))
    for one in drawn:
        rates = _rates(one.result)
        for lo, hi in sorted({(row["lo"], row["hi"]) for row in one.result.rows if row["how"] == "fixed"}):
            name = "recompute" if hi - lo == _depth(one.result) else "other"
            fixed = [{"value": _median(one.result, rate, "fixed", lo, hi)} for rate in rates]
            one.line(times, rates, fixed, name, markersize=4, linewidth=1.3)
            if name == "other":
                _say(times, str(Group(lo, hi)), (rates[0], fixed[0]["value"]), (-5, 0), one, ha="right", va="center")
        chosen = [bootstrap(_seconds(one.result, rate, "chosen"), "median").summary() for rate in rates]
        one.line(times, rates, chosen, "droidspeak", linewidth=2.4)
        for rate, entry in zip(rates, chosen, strict=True):
            _say(times, _usual(one.result, rate), (rate, entry["value"]), (3, -14), one, ha="left")
            one.point(ratios, rate * 2**one.shift, _over_best(one.result, rate), "droidspeak")
    times.set(ylabel="time to first token, s", yscale="log")
    bottom, top = times.get_ylim()
    times.set_ylim(bottom / 1.15, top)
    times.set_yticks([tick for tick in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5) if bottom < tick < top])
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_formatter("")
    for name, width, label in (
        ("droidspeak", 2.4, "chosen for this link"),
        ("other", 1.3, "always the group named"),
        ("recompute", 1.3, "always all layers (full prefill)"),
    ):
        times.plot([], [], f"{LOOKS[name].marker}-", color=COLOURS[name], linewidth=width, label=label)
    for at, name, dashes, label in ((1, "mark", ":", "best fixed group"), (TARGET, "target", "--", f"asked: {TARGET}")):
        ratios.axhline(at, color=COLOURS[name], linestyle=dashes, linewidth=1.4)
        times.plot([], [], dashes, color=COLOURS[name], label=label)
    ratios.set_ylabel("TTFT / that of the best fixed group")
    shown = sorted({rate for one in drawn for rate in _rates(one.result)})
    for ax in (times, ratios):
        ax.set(xscale="log", xlabel="link, Gbit/s (shaped)")
        ax.set_xticks(shown, [f"{rate:g}" for rate in shown])
        ax.xaxis.set_minor_formatter("")
        ax.set_xlim(shown[0] / 1.5, shown[-1] * 1.3)
    worst = drawn[0].result.summary.value("ttft_x", variant="chosen", than="best fixed", across="worst")
    fig.suptitle(f"The chosen group takes at most {worst:.2f} of the best fixed one's time, on any link", fontsize=12)
    legend(fig, times, drawn, "ttft_x")
    return fig


def _say(ax: Axes, text: str, at: tuple[float, float], apart: tuple[int, int], one: Drawn, **where: str) -> None:
    """Name a group beside a point, in the strength of its run."""
    behind = {"color": "white", "alpha": 0.7, "pad": 0.5}
    strength = one.style["alpha"] ** 0.5
    ax.annotate(text, at, apart, textcoords="offset points", fontsize=8.5, alpha=strength, bbox=behind, **where)


def choice_rows(result: Result) -> Rows:
    """The choice at each link in numbers."""
    rows = []
    for rate in _rates(result):
        groups = {(r["lo"], r["hi"]) for r in result.rows if (r["gbit_per_s"], r["how"]) == (rate, "fixed")}
        fixed = {group: _median(result, rate, "fixed", *group) for group in groups}
        best, chosen = min(fixed, key=fixed.__getitem__), _median(result, rate, "chosen")
        expected = [r["expected_s"] for r in result.rows if (r["gbit_per_s"], r["how"]) == (rate, "chosen")]
        rows.append(
            {
                "link, Gbit/s": f"{rate:g}",
                "chosen": _usual(result, rate),
                "TTFT, s": round(chosen, 3),
                "expected, s": round(float(np.median(expected)), 3),
                "best fixed": str(Group(*best)),
                "its TTFT, s": round(fixed[best], 3),
                "worst fixed, s": round(max(fixed.values()), 3),
                f"choice / best (target {TARGET})": interval(_over_best(result, rate), 3),
            }
        )
    return rows


def _rates(result: Result) -> list[float]:
    return sorted({row["gbit_per_s"] for row in result.rows})


def _depth(result: Result) -> int:
    return max(row["layers"] for row in result.rows)


def _seconds(result: Result, rate: float, how: str, *ends: int) -> list[float]:
    """Seconds to the first token over one link, of a fixed group [lo, hi) or of the choice, by round."""
    of = [row for row in result.rows if (row["gbit_per_s"], row["how"]) == (rate, how)]
    return [row["ttft_s"] for row in of if not ends or (row["lo"], row["hi"]) == ends]


def _median(result: Result, rate: float, how: str, *ends: int) -> float:
    return float(np.median(_seconds(result, rate, how, *ends)))


def _usual(result: Result, rate: float) -> str:
    """The group that is chosen most often over one link."""
    rows = [row for row in result.rows if (row["gbit_per_s"], row["how"]) == (rate, "chosen")]
    groups = [str(Group(row["lo"], row["hi"])) for row in rows]
    return max(sorted(set(groups)), key=groups.count)


def _over_best(result: Result, rate: float) -> Entry:
    return result.summary.of("ttft_x", variant="chosen", than="best fixed", gbit_per_s=rate)
