"""The figures and tables of notebook 44: schedulers under a load that changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.sarathi.policy_text import place_of
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import COLOURS, log_ticks, panels
from firsttoken_studies.record.results import Result, Table, distinct, frame_of
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.changing_load import ABOVE_BEST, ADAPTIVE, strict
from firsttoken_studies.sarathi.figures import look_of, scaled, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COURSE = ("prefill_first", "sarathi 512", "shortest_first 512", "adaptive_budget")


def within(recorded: Result | None, now: Result) -> Figure:
    """The share of requests within each objective by scheduler, coloured by its rank there; the best has a
    frame. A panel for the record, and one for the reader's run: two tables do not lie over each other."""
    from matplotlib.patches import Rectangle

    results = over(recorded, now)
    schedulers = list(dict.fromkeys(name for shown in results for name in _schedulers(shown.result)))
    fig, axes = panels(1, len(results), figsize=(9, 0.34 * len(schedulers) + 2), sharey=True, squeeze=False)
    for ax, shown in zip(axes[0], results, strict=True):
        result, iteration_s = shown.result, shown.result.floors["decode_iteration"]["value"]
        objectives = result.parameters["changing_load"]["objectives"]
        entries = [
            [result.summary.get("within_pct", **place_of(name), objective=times) for times in objectives]
            for name in schedulers
        ]
        shares = np.array([[entry["value"] if entry else np.nan for entry in row] for row in entries])
        ranks = 1 + (shares[None] > shares[:, None]).sum(1)  # the best 1, as have all that are as good
        ax.imshow(np.where(np.isnan(shares), np.nan, ranks), cmap="Blues_r", vmin=1, vmax=14, aspect="auto")
        for row_index, column in np.argwhere(~np.isnan(shares)):
            dark = "white" if ranks[row_index, column] <= 5 else "black"
            ax.text(
                column, row_index, f"{shares[row_index, column]:.0f}", ha="center", va="center", color=dark, fontsize=10
            )
            if ranks[row_index, column] == 1:
                frame = {"fill": False, "edgecolor": COLOURS["report"], "linewidth": 2.5}
                ax.add_patch(Rectangle((column - 0.46, row_index - 0.44), 0.92, 0.88, **frame))
        ax.set_xticks(range(len(objectives)), [f"{1e3 * times * iteration_s:.0f}" for times in objectives])
        n = max(entry["n"] for row in entries for entry in row if entry)
        ax.set_title(f"{shown.who(n)}\n{result.provenance['costs']}", fontsize="medium")
        ax.set(xlabel="gaps of at most, ms")
        ax.grid(visible=False)
    axes[0][0].set_yticks(range(len(schedulers)), [told(name) for name in schedulers])
    fig.suptitle("Every objective has another best scheduler (frame): % of requests within it")
    return fig


def course(recorded: Result | None, now: Result) -> Figure:
    """Phase by phase, the median first token of who arrived and the P99 of the gaps; bands are the busy phases."""
    results, load = over(recorded, now), now.parameters["changing_load"]
    fig, axes = panels(1, 2, figsize=(9, 4.2))
    shown = (("ttft_p50_s", 1.0, "median first token, s"), ("tbt_p99_s", 1e3, "P99 between two tokens, ms"))
    for ax, (column, scale, label) in zip(axes, shown, strict=True):
        for phase in (phase for phase, factor in enumerate(load["factors"], start=1) if factor > 1):
            ax.axvspan(phase - 0.5, phase + 0.5, color=COLOURS["other"], alpha=0.35, linewidth=0)
        for result_drawn in results:
            phases = frame_of(strict(result_drawn.result.rows, "phase"))
            for name in (name for name in COURSE if name in _schedulers(result_drawn.result)):
                means = phases[phases.scheduler == name].groupby("phase")[column].mean()
                entries, title = (
                    [{"value": value} for value in means],
                    {"label": told(name)} if result_drawn.own else {},
                )
                result_drawn.line(ax, means.index + 1, entries, look_of(name), scale=scale, **title)
        ax.set_xticks(range(1, 1 + len(load["factors"])))
        ax.set(yscale="log", xlabel="phase of the load (band: twice the mean rate)", ylabel=label)
        log_ticks(ax.yaxis)
    fig.suptitle("Twice the mean rate: whole prompts stall running requests, chunks let new ones wait")
    legend(fig, axes[1], results, columns=5, size="small")
    return fig


def load_rows(result: Result) -> Table:
    """Yield the clients' times, by scheduler, under the strict objective."""
    summary = result.summary
    for name in _schedulers(result):
        labels = place_of(name)
        yield {
            "scheduler": told(name),
            "P99 between tokens, ms": interval(scaled(summary.of("tbt_p99_s", **labels), 1e3), 0),
            "light: P50 TTFT, s": interval(summary.of("ttft_p50_s", **labels, tenant="light"), 2),
            "light: P99": interval(summary.of("ttft_p99_s", **labels, tenant="light"), 1),
            "heavy: P50 TTFT, s": interval(summary.of("ttft_p50_s", **labels, tenant="heavy"), 2),
            "heavy: P99": interval(summary.of("ttft_p99_s", **labels, tenant="heavy"), 1),
            "late, % of requests": interval(summary.of("late_pct", **labels), 0),
            "longest wait, s": interval(summary.of("longest_wait_s", **labels), 1),
        }


def above_rows(result: Result) -> Table:
    """The adaptive budget's share over the best of fixed budgets and rivals, by objective."""
    iteration_s, summary = result.floors["decode_iteration"]["value"], result.summary
    for times in result.parameters["changing_load"]["objectives"]:
        if above := summary.get("within_points", **ABOVE_BEST, objective=times):
            yield {
                "gaps of at most, ms": f"{1e3 * times * iteration_s:.0f}",
                "adaptive, % within": interval(summary.of("within_pct", scheduler=ADAPTIVE, objective=times), 0),
                "above the best of the others, points": interval(above, 1),
            }


def _schedulers(result: Result) -> list[str]:
    return distinct(result.rows, "scheduler", what="run")
