"""The figures and the table of notebook 40."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.sarathi.policy import scheduler_labels
from firsttoken_studies.nb40_generation_stalls.study import LIVE, SIMULATED
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, panels
from firsttoken_studies.record.results import Result, Table, distinct, rows_where
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.styles import NAMES, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def stalls(recorded: Result | None, now: Result) -> Figure:
    """Draw the tokens of a running request after a long prompt has come, by scheduler (Figure 1a); one run each. Each
    line has its mark where the prompt has its first token."""
    fig, axes = panels(1, 2, figsize=(9, 4.6), sharey=True)
    costs = " and ".join(
        {result_drawn.result.parameters["hardware"]["costs"]: 0 for result_drawn in over(recorded, now)}
    )
    titles, shown = {LIVE: "live, this model", SIMULATED: f"simulated on {costs}"}, {}
    for ax, (run, title) in zip(axes, titles.items(), strict=True):
        for result_shown in over(recorded, now):
            rows = rows_where(result_shown.result.rows, run=run, repeat=1)
            for scheduler in distinct(rows, "scheduler"):
                scheduler_rows = rows_where(rows, scheduler=scheduler)
                times = [row["at_s"] for row in rows_where(scheduler_rows, request=0)]
                (first_s,) = (row["ttft_s"] for row in rows_where(scheduler_rows, request="prompt"))
                name, label = NAMES[scheduler.partition(" ")[0]]
                look, width = LOOKS[name], 2.2 if result_shown.own else 1.4
                ax.step(
                    times, range(len(times)), where="post", color=look.colour, linewidth=width, **result_shown.style
                )
                edge = {"markeredgecolor": "black"} if result_shown.own else {}
                point = (first_s, np.searchsorted(times, first_s, side="right") - 1)
                ax.plot(*point, look.marker, ms=8, color=look.colour, **edge, **result_shown.style)
                shown[label] = handle(color=look.colour, marker=look.marker)
        ax.set_title(title, fontsize="medium")
        ax.set(xlabel="time since the long prompt came, s", xlim=(0, None), ylim=(-0.7, None))
    fig.suptitle("Cut into chunks, a long prompt slows running requests; whole, it stops them")
    axes[0].set_ylabel("tokens of a running request since")
    names = fig.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3, fontsize="small")
    name_results(fig, over(recorded, now), legend=names)
    return fig


def one_arrival(scenes: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """Draw two runs of notebook 40's scene, by scheduler: "tokens" are the times of a running request's next tokens,
    "first" that of the prompt's first, ms. Axes are the same for every run; letters are few, as they take longest."""
    fig, ax = panels(figsize=(7.2, 2.8), layout="none")
    fig.subplots_adjust(left=0.08, right=0.98, bottom=0.18, top=0.89)
    for (scheduler, scene), side in zip(scenes.items(), ("left", "right"), strict=True):
        name, label = NAMES[scheduler]
        times = [0, *scene["tokens"]]
        ax.step(times, range(len(times)), where="post", color=COLOURS[name])
        ax.text(times[-1], len(times) - 1, f"  {label}  ", color=COLOURS[name], ha=side, va="center")
        first = np.searchsorted(times, scene["first"], side="right") - 1
        ax.plot(scene["first"], first, LOOKS[name].marker, ms=9, color=COLOURS[name])
    ax.set_title(title, fontsize="medium")
    ax.set(xlim=(0, 1330), xticks=range(0, 1201, 300), ylim=(-0.5, 12.9), yticks=range(0, 13, 4))
    ax.set(xlabel="time since the long prompt came, ms", ylabel="tokens since")
    return fig


def stall_rows(result: Result) -> Table:
    """The longest gap, over a plain one, and the prompt's TTFT, by run and scheduler."""
    runs = dict.fromkeys((row["run"], row["scheduler"]) for row in result.rows)
    for run, scheduler in runs:
        labels = {"source": run} | scheduler_labels(scheduler)
        yield {
            "run": f"{run}: {told(scheduler)}",
            "longest gap, ms": interval(result.summary.of("worst_gap_ms", **labels), 0),
            "over a plain gap": interval(result.summary.of("worst_gap_x", **labels, than="plain gap"), 1),
            "prompt's TTFT, s": interval(result.summary.of("ttft_s", **labels), 2),
        }
