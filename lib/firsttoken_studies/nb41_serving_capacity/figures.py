"""The figure and the tables of notebook 41."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from firsttoken.sarathi.capacity import STRICT, TIMES
from firsttoken.sarathi.policy import scheduler_labels
from firsttoken_studies.nb41_serving_capacity.pipeline_bubbles import SIZE, TIME, WHOLE
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, log_ticks, panels
from firsttoken_studies.record.results import Result, Table, distinct
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.leaderboard import BASE
from firsttoken_studies.sarathi.styles import apart, card, look_of, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PAPER_X = 2.6  # the load of prefill first, Mistral-7B on one A100 (abstract)


def schematic() -> Schematic:
    """Draw the search: the rate of requests is doubled until a limit breaks, then the distance is halved."""
    alt = (
        "The rate of requests is doubled from 1 to 2, 4 and 8 requests a second, until at 8 the limit on the times "
        "between tokens is broken. Then the distance is halved: 6 is within the limit, 7 is not. The capacity is 6, "
        "the highest rate within the limit."
    )
    sketch = Schematic(20, 6.6, alt)
    sketch.text(0.2, 0.4, "Capacity: the highest rate of requests at which the limit holds", heading=True)
    rates = {1: True, 2: True, 4: True, 6: True, 7: False, 8: False}
    for rate, holds in rates.items():
        sketch.box(2 * rate, 2.4, str(rate), "sarathi" if holds else "target", width=1.4)
    for rate in (1, 2, 4):
        sketch.arrow((2 * rate + 0.7, 2.2), (4 * rate + 0.6, 2.2), "double" if rate > 1 else "")
    sketch.arrow((16.7, 3.6), (12.8, 3.6))
    sketch.text(15, 4, "half way back", align="center")
    sketch.text(12.7, 5, "the capacity: 6 holds, 7 does not", align="center")
    sketch.text(17.6, 2.9, "limit broken")
    sketch.text(0.2, 2.9, "limit holds")
    sketch.arrow((1.6, 5.6), (18.4, 5.6))
    sketch.text(1.6, 6.1, "requests a second")
    return sketch


def capacities(recorded: Result | None, now: Result) -> Figure:
    """Capacity over that of prefill first by scheduler and objective, means over draws with their intervals.

    Cards have panels of their own: a factor on one is none on another.
    """
    results, summary = over(recorded, now), (recorded or now).summary
    shown_panels = [
        (heading, objective, shown)
        for heading, shown in apart(recorded, now, card).items()
        for objective in dict.fromkeys(
            entry["where"]["objective"]
            for drawn_result in shown
            for entry in drawn_result.result.summary.all("capacity_x", than=BASE)
        )
    ]
    rows = [row for shown in results for row in shown.result.rows]
    schedulers = [name for name in distinct(rows, "scheduler", what="capacity") if name != BASE]
    size = (10, 0.36 * len(schedulers) + 2.2)
    fig, axes = panels(1, len(shown_panels), figsize=size, sharey=True, squeeze=False)
    for ax, (heading, objective, group) in zip(axes[0], shown_panels, strict=True):
        for shown, (position, scheduler) in product(group, enumerate(schedulers)):
            labels = scheduler_labels(scheduler) | {"objective": objective}
            entry = shown.result.summary.get("capacity_x", **labels, than=BASE)
            shift = shown.shift if len(group) > 1 else 0.0
            shown.point(ax, position + shift, entry, look_of(scheduler), along="x")
        ax.axvline(1, color=COLOURS["floor"], linewidth=1, linestyle=":")
        if objective == STRICT:
            ax.axvline(PAPER_X, color=COLOURS["paper"], linewidth=7, alpha=0.5, zorder=1)
            ax.text(PAPER_X, -0.7, f" paper: {PAPER_X}", color=COLOURS["mark"], fontsize="small")
        ax.set(xscale="log", xlabel="capacity / prefill first's")
        ax.set_title(f"{heading}\n{objective}: P99 of gaps ≤ {TIMES[objective]} steps", fontsize=9.5)
        log_ticks(ax.xaxis)
    axes[0][0].set_yticks(range(len(schedulers)), [told(name) for name in schedulers])
    axes[0][0].set_ylim(len(schedulers) - 0.5, -1)
    best = summary.get("capacity_x", scheduler="sarathi", budget_tokens=512, objective=STRICT, than=BASE)
    if best is not None:
        fig.suptitle(f"Within the strict objective Sarathi serves {best['value']:.2f} times the load of prefill first")
    name_results(fig, results, "capacity_x")
    return fig


def capacity_rows(result: Result) -> Table:
    """Yield the ratios of capacities to the prefill-first scheduler's."""
    for name in distinct(result.rows, "scheduler", what="capacity"):
        line = {"scheduler": told(name)}
        for objective in distinct(result.rows, "objective", what="capacity"):
            over_base = result.summary.get("capacity_x", **scheduler_labels(name), objective=objective, than=BASE)
            line[f"{objective}, over prefill first"] = interval(over_base, 2)
        if name != BASE:
            yield line


def ablation_rows(result: Result) -> Table:
    """Table 4 at one rate: the paper's beside what was simulated."""
    paper = {"hybrid_only": ("0.53", "0.68"), "chunked_only": ("1.04", "0.17"), "sarathi": ("0.76", "0.14")}
    for name in distinct(result.rows, "scheduler", what="ablation"):
        yield {
            "scheduler": told(name),
            "P50 TTFT, s": interval(result.summary.of("ttft_p50_s", **scheduler_labels(name), case="ablation"), 2),
            "paper, P50 TTFT (Yi-34B)": paper[name.partition(" ")[0]][0],
            "P99 TBT, s": interval(result.summary.of("tbt_p99_s", **scheduler_labels(name), case="ablation"), 3),
            "paper, P99 TBT (Yi-34B)": paper[name.partition(" ")[0]][1],
        }


def bubble_rows(result: Result) -> Table:
    """Yield the idle time of two stages (Figure 13), by the kind of chunks in their steps."""
    kinds = {WHOLE: "whole prompts", SIZE: "chunks of equal size", TIME: "chunks of equal time"}
    summary = result.summary
    for kind, told_as in kinds.items():
        yield {
            "prompts": told_as,
            "idle, % of the devices' time": interval(summary.of("bubbles_pct", variant=kind), 1),
            "variation of the steps": interval(summary.of("step_cv", variant=kind), 2),
            "time in all / that of equal size": interval(summary.get("makespan_x", variant=kind, than=SIZE), 2) or "1",
        }
