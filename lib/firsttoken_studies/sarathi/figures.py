"""The figures and tables of notebooks 40 to 42."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.sarathi.capacity import STRICT, TIMES
from firsttoken.sarathi.policy import scheduler_labels
from firsttoken_studies.nb40_generation_stalls.study import LIVE, SIMULATED
from firsttoken_studies.nb41_serving_capacity.pipeline_bubbles import SIZE, TIME, WHOLE
from firsttoken_studies.nb42_the_simulator_and_a_gpu.simulator_error import METRICS, QUANTILES, VLLM
from firsttoken_studies.nb42_the_simulator_and_a_gpu.simulator_error import SIMULATED as FORETOLD
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, log_ticks, panels
from firsttoken_studies.record.results import Result, Table, distinct, rows_where
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.leaderboard import BASE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "prefill_first": ("prefill first", "prefill first (vLLM 0.2)"),
    "hybrid_only": ("hybrid batches", "whole prompts beside decodes"),
    "iteration_level": ("hybrid batches", "whole prompts, blocks reserved (Orca)"),
    "chunked_only": ("chunks alone", "chunks in turns with decodes"),
    "sarathi": ("sarathi", "Sarathi"),
    "prefill_cap": ("other", "two budgets (P-PAS)"),
    "deadline": ("other", "deadlines (Niyama)"),
    "shortest_first": ("short first", "short prompts first"),
    "adaptive_budget": ("measured", "adaptive budget"),
}


PAPER_X = 2.6  # the load of prefill first, Mistral-7B on one A100 (abstract)


def told(scheduler: str) -> str:
    """A scheduler as a reader knows it: "sarathi 512" is "Sarathi, 512"."""
    name, _, budget = scheduler.partition(" ")
    return NAMES[name][1] + (f", {budget}" if budget else "")


def look_of(scheduler: str) -> str:
    """Under which name of ``plot.LOOKS`` a scheduler is drawn."""
    return NAMES[scheduler.partition(" ")[0]][0]


def name_schedulers(axes: Axes, schedulers: Sequence[str]) -> None:
    """Make the legend of ``axes`` name the marks of ``schedulers``."""
    for name in schedulers:
        look = LOOKS[look_of(name)]
        axes.plot([], [], linestyle="none", marker=look.marker, color=look.colour, label=told(name))


def scaled(entry: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """An entry of a summary in another unit."""
    return entry | {name: scale * entry[name] for name in ("value", "low", "high") if name in entry}


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


def capacities(recorded: Result | None, now: Result) -> Figure:
    """Capacity over that of prefill first by scheduler and objective, means over draws with their intervals."""
    results, summary = over(recorded, now), (recorded or now).summary
    entries = [entry for shown in results for entry in shown.result.summary.all("capacity_x", than=BASE)]
    objectives = list(dict.fromkeys(entry["where"]["objective"] for entry in entries))
    rows = [row for shown in results for row in shown.result.rows]
    schedulers = [name for name in distinct(rows, "scheduler", what="capacity") if name != BASE]
    size = (9, 0.36 * len(schedulers) + 2)
    fig, axes = panels(1, len(objectives), figsize=size, sharey=True, squeeze=False)
    for ax, objective in zip(axes[0], objectives, strict=True):
        for shown, (position, scheduler) in product(results, enumerate(schedulers)):
            entry = shown.result.summary.get(
                "capacity_x", **scheduler_labels(scheduler), objective=objective, than=BASE
            )
            shown.point(ax, position + shown.shift, entry, look_of(scheduler), along="x")
        ax.axvline(1, color=COLOURS["floor"], linewidth=1, linestyle=":")
        if objective == STRICT:
            ax.axvline(PAPER_X, color=COLOURS["paper"], linewidth=7, alpha=0.5, zorder=1)
            ax.text(PAPER_X, -0.7, f" paper: {PAPER_X}", color=COLOURS["mark"], fontsize="small")
        ax.set(xscale="log", xlabel="capacity / that of prefill first")
        ax.set_title(f"{objective}: P99 of gaps ≤ {TIMES[objective]} decode steps", fontsize=10.5)
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


def errors(result: Result) -> Figure:
    """Draw each request of vLLM's run beside the simulated one: on the diagonal they agree."""
    titles = {"ttft": ("TTFT", "s", 1.0), "tpot": ("TPOT", "ms", 1e3), "latency": ("latency", "s", 1.0)}
    fig, axes = panels(1, 3, figsize=(12, 4.2))
    for ax, metric in zip(axes, METRICS, strict=True):
        name, unit, scale = titles[metric]
        real, simulated = (scale * result.frame(run=run)[f"{metric}_s"] for run in (VLLM, FORETOLD))
        ax.plot(real, simulated, LOOKS["measured"].marker, color=COLOURS["measured"], markersize=3, alpha=0.6)
        limits = [0, 1.05 * max(real.max(), simulated.max())]
        ax.plot(limits, limits, color=COLOURS["floor"], linewidth=1, linestyle=":")
        ax.set(xlabel=f"vLLM's {name}, {unit}", ylabel=f"simulated, {unit}", title=f"{name}, n = {len(real)}")
    return fig


def error_rows(result: Result) -> Table:
    """Return by how much mean, median and P99 are off."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
    for metric, told_as in names.items():
        line = {"metric": told_as}
        for name in QUANTILES:
            off = result.summary.value(f"{metric}_{name}_off_pct", source=FORETOLD, than=VLLM)
            line[f"{name} off, %"] = f"{off:+.1f}"
        yield line


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
