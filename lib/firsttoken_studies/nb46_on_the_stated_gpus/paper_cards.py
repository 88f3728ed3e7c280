"""Sarathi-Serve's Figures 12 and 1b and its Table 4 for the paper's own models and cards, by measured operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.sarathi.capacity import ClientTimes, Objective, capacity
from firsttoken.sarathi.policy import Policy, scheduler_labels
from firsttoken.simulation.costs.operator_tables import tables_from
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.nb46_on_the_stated_gpus.card_capacity import CONTEXT, DECODES, PAPER_BAR, StepSum, bench_of
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import KIND
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, log_ticks, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, distinct, frame_of, rows_where
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.leaderboard import BASE
from firsttoken_studies.sarathi.styles import look_of, name_schedulers, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_BATCH = "the best batch of prefill first"
PAPER_SWEEP = {("mistral-7b on 1 a100-sxm", 100): 3.5, ("yi-34b on 2 a100-sxm", 1000): 1.65}  # Figure 12
PAPER_LOADS = {  # Table 4, in seconds: the median TTFT and the P99 time between tokens
    "yi-34b on 2 a100-sxm, openchat-sharegpt4-fit, 1 requests/s": {
        "hybrid_only": (0.53, 0.68),
        "chunked_only 1024": (1.04, 0.17),
        "sarathi 1024": (0.76, 0.14),
    },
    "yi-34b on 2 a100-sxm, arxiv-summarization-fit, 0.5 requests/s": {
        "hybrid_only": (None, 1.38),
        "chunked_only 1024": (5.38, None),
        "sarathi 1024": (3.9, 0.17),
    },
}
_FIRST_RATE = 1.0  # requests/s at which each search begins


def _hardware(text: str) -> Hardware:
    """The hardware of "MODEL GPUS CARD". Raises ProfileError for another text, and what the hardware raises."""
    words = text.split()
    if len(words) != 3 or not words[1].isdigit():
        raise ProfileError(f"{text!r} is no set-up; write MODEL GPUS CARD, for example yi-34b 2 a100-sxm")
    model, gpus, card = words
    return Hardware(card, DECODES, CONTEXT, model=model, gpus=int(gpus))


def _named(hardware: Hardware) -> str:
    return f"{hardware.model} on {hardware.gpus} {hardware.costs}"


@dataclass(frozen=True)
class ObjectiveSweepConfig:
    """``cases`` of "MODEL GPUS CARD" serve ``requests`` of ``lengths``, drawn ``seeds`` times, under each of
    ``bounds_ms`` on the P99 of the time between tokens: prefill first with each of ``batches`` as the most requests at
    once, Sarathi with each of ``budgets`` and the largest of them."""

    cases: tuple[str, ...]
    bounds_ms: tuple[int, ...]
    batches: tuple[int, ...]
    budgets: tuple[int, ...]
    lengths: str
    requests: int
    seeds: int

    def __post_init__(self) -> None:
        if min(self.requests, self.seeds, *self.bounds_ms, *self.batches, *self.budgets) < 1:
            raise ProfileError("objective_sweep: all numbers must be at least 1")


def objective_sweep(profile: Profile, *, step_s: StepSum | None = None) -> Outcome:
    """Rows {case, seed, scheduler, batch, bound_ms, requests_per_s, ...}: Figure 12.

    ``step_s`` is a reader's sum of the operators of a step; None takes the library's.
    """
    config = profile.section("objective_sweep", ObjectiveSweepConfig)
    lines = [(BASE, batch) for batch in config.batches]
    lines += [(f"sarathi {budget}", max(config.batches)) for budget in config.budgets]
    cases = [_hardware(text) for text in config.cases]
    runs = [
        (case, scheduler, batch, seed)
        for case in cases
        for scheduler, batch in lines
        for seed in range(profile.seed, profile.seed + config.seeds)
    ]
    rows: Rows = []
    for hardware, scheduler, batch, seed in track(runs, desc="objective_sweep"):
        bench = bench_of(hardware, config.lengths, config.requests, batch, _FIRST_RATE, step_s)
        policy = Policy.named(scheduler)
        served: dict[float, ClientTimes] = {}  # by rate: neither scheduler asks which bound it is judged by

        def serve(rate: float, bench=bench, policy=policy, seed=seed, served=served) -> ClientTimes:
            if rate not in served:
                served[rate], _ = bench.serve(policy, Objective(1.0), seed, rate)
            return served[rate]

        for bound in config.bounds_ms:
            rate, _ = capacity(serve, Objective(bound / 1e3), start=_FIRST_RATE)
            row = {"case": _named(hardware), "seed": seed, "scheduler": scheduler, "batch": batch, "bound_ms": bound}
            rows.append(row | {"requests_per_s": rate})
    return Outcome(rows, provenance={"kind": KIND, "costs": tables_from()})


def sweep_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Capacity by line and bound, and Sarathi's over the best batch of prefill first on the same draws."""
    summary = Summary()
    for (case, bound), case_rows in frame_of(rows).groupby(["case", "bound_ms"], sort=False):
        labels = {"case": case, "objective": f"{bound} ms"}
        lines = case_rows.groupby(["scheduler", "batch"], sort=False).requests_per_s
        for (name, batch), rates in lines:
            entry = bootstrap(rates).summary("requests/s")
            summary.add("capacity_requests_per_s", entry, **scheduler_labels(name), **labels, requests=batch)
        best = max((rates for (name, _), rates in lines if name == BASE), key=np.mean)
        for (name, _), rates in lines:
            if name != BASE and best.min() > 0:
                ratio = ratio_of_means(rates, best).summary("x")
                summary.add("capacity_x", ratio, **scheduler_labels(name), **labels, than=BEST_BATCH)
    return summary


@dataclass(frozen=True)
class FixedLoadConfig:
    """``cases`` of "MODEL GPUS CARD" serve each of ``loads``, "LENGTHS RATE" in requests a second, with each of
    ``schedulers``: ``requests`` of them, at most ``batch`` at once, drawn ``seeds`` times."""

    cases: tuple[str, ...]
    loads: tuple[str, ...]
    schedulers: tuple[str, ...]
    requests: int
    seeds: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.requests, self.seeds, self.batch) < 1:
            raise ProfileError("fixed_load: requests, seeds and batch must be at least 1")
        for load in self.loads:
            _load(load)


def _load(text: str) -> tuple[str, float]:
    """The lengths and the rate of "LENGTHS RATE". Raises ProfileError for another text."""
    try:
        lengths, rate = text.split()
        if 0 < (per_s := float(rate)) < math.inf:
            return lengths, per_s
    except ValueError:
        pass
    raise ProfileError(f"fixed_load: {text!r} is no load; write LENGTHS RATE, for example sharegpt 0.5")


def fixed_load(profile: Profile, *, step_s: StepSum | None = None) -> Outcome:
    """Rows {case, lengths, rate, seed, scheduler, ttft_p50_s, tbt_p99_s, ...}: Figure 1b and Table 4.

    ``step_s`` is a reader's sum of the operators of a step; None takes the library's.
    """
    config = profile.section("fixed_load", FixedLoadConfig)
    cases = [_hardware(text) for text in config.cases]
    runs = [
        (case, load, scheduler, seed)
        for case in cases
        for load in config.loads
        for scheduler in config.schedulers
        for seed in range(profile.seed, profile.seed + config.seeds)
    ]
    rows: Rows = []
    for hardware, load, scheduler, seed in track(runs, desc="fixed_load"):
        lengths, rate = _load(load)
        bench = bench_of(hardware, lengths, config.requests, config.batch, _FIRST_RATE, step_s)
        served, _ = bench.serve(Policy.named(scheduler), Objective(1.0), seed, rate)
        labels = {"case": f"{_named(hardware)}, {lengths}, {rate:g} requests/s", "lengths": lengths, "rate": rate}
        rows.append(labels | {"seed": seed, "scheduler": scheduler} | asdict(served))
    return Outcome(rows, provenance={"kind": KIND, "costs": tables_from()})


def load_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The median TTFT and the P99 time between tokens by load and scheduler, over the draws."""
    summary, times = Summary(), {name: (name, "mean", "s") for name in ("ttft_p50_s", "tbt_p99_s")}
    for (case, name), case_rows in frame_of(rows).groupby(["case", "scheduler"], sort=False):
        summary.by(case_rows, {}, times, **scheduler_labels(name), case=case)
    return summary


def capacity_by_bound(recorded: Result | None, now: Result) -> Figure:
    """Capacity over the bound on the P99 between tokens, a line a scheduler and batch; the paper's factor as a bar."""
    results = over(recorded, now)
    rows = [row for shown in results for row in shown.result.rows]
    cases, ticks = distinct(rows, "case"), sorted(distinct(rows, "bound_ms"))
    fig, axes = panels(1, len(cases), figsize=(9, 4.9), squeeze=False)
    for ax, case in zip(axes[0], cases, strict=True):
        for shown in results:
            case_rows = rows_where(shown.result.rows, case=case)
            bounds = sorted(distinct(case_rows, "bound_ms"))
            for name, batch in _lines(case_rows):
                summary = shown.result.summary
                label_list = [scheduler_labels(name) | {"case": case, "objective": f"{bound} ms"} for bound in bounds]
                entries = [summary.get("capacity_requests_per_s", **labels, requests=batch) for labels in label_list]
                shown.line(ax, bounds, entries, look_of(name), linestyle=_dashes(rows, name, batch))
        _paper_factor(ax, case, (recorded or now).summary)
        ax.set(xscale="log", yscale="log", title=case, xlabel="bound on the P99 between tokens, ms")
        log_ticks(ax.yaxis)
        ax.set_xticks(ticks, ticks, fontsize="small")
        ax.xaxis.set_minor_formatter("")
    axes[0][0].set_ylabel("capacity, requests/s (simulated)")
    for name, batch in _lines(rows):
        look, dashes = LOOKS[look_of(name)], _dashes(rows, name, batch)
        label = f"prefill first, at most {batch} at once" if name == BASE else told(name)
        axes[0][0].plot([], [], color=look.colour, marker=look.marker or None, linestyle=dashes, label=label)
    axes[0][0].plot([], [], **PAPER_BAR, label="the paper's factor")
    fig.suptitle(_sweep_message((recorded or now).summary))
    legend(fig, axes[0][0], results, "capacity_requests_per_s", size="small")
    return fig


def _sweep_message(summary: Summary) -> str:
    """Sarathi's factor at the tightest and at the loosest bound of the first case, for its best budget at each."""
    entries = summary.all("capacity_x", than=BEST_BATCH)
    by_bound: dict[str, float] = {}
    for entry in entries:
        if entry["where"]["case"] == entries[0]["where"]["case"]:
            bound = entry["where"]["objective"]
            by_bound[bound] = max(by_bound.get(bound, 0.0), entry["value"])
    if len(by_bound) < 2:
        return "Capacity by the bound on the time between tokens"
    (tight, most), *_, (loose, least) = by_bound.items()
    model = entries[0]["where"]["case"].partition(" ")[0]
    return f"{model}: chunks serve {most:.1f} times the best batch of whole prompts at {tight}, {least:.1f} at {loose}"


_DASHES = ("-", "--", ":")


def _lines(rows: Rows) -> list[tuple[str, int]]:
    """Every (scheduler, batch), in the order in which they first appear."""
    return list(dict.fromkeys((row["scheduler"], row["batch"]) for row in rows))


def _dashes(rows: Rows, name: str, batch: int) -> str:
    """Return the dashes of a line: each batch or budget of the same kind of scheduler has its own."""
    kind = name.partition(" ")[0]
    same = [line for line in _lines(rows) if line[0].partition(" ")[0] == kind]
    return _DASHES[same.index((name, batch)) % len(_DASHES)]


def _paper_factor(ax: Any, case: str, summary: Summary) -> None:
    for (named, bound), factor in PAPER_SWEEP.items():
        entries = summary.all("capacity_requests_per_s", scheduler=BASE, case=case, objective=f"{bound} ms")
        best = max((entry["value"] for entry in entries), default=0.0)
        if named == case and best > 0:
            ax.plot([bound / 1.08, bound * 1.08], [factor * best] * 2, **PAPER_BAR)


def sweep_rows(result: Result) -> Table:
    """A line a case and bound: the capacity of each scheduler and batch, and each Sarathi's over the best batch."""
    for case, bound in product(distinct(result.rows, "case"), distinct(result.rows, "bound_ms")):
        labels = {"case": case, "objective": f"{bound} ms"}
        line: dict[str, Any] = {"case": f"{case}, {bound} ms"}
        for name, batch in _lines(result.rows):
            entry = result.summary.get("capacity_requests_per_s", **scheduler_labels(name), **labels, requests=batch)
            line[f"{told(name)}, {batch} at once"] = interval(entry, 2)
            ratio = result.summary.get("capacity_x", **scheduler_labels(name), **labels, than=BEST_BATCH)
            if name != BASE:
                line[f"{told(name)} over the best batch"] = interval(ratio, 2)
        yield line


def times_by_load(recorded: Result | None, now: Result) -> Figure:
    """The median TTFT and the P99 time between tokens by load and scheduler, with the paper's values."""
    results = over(recorded, now)
    rows = [row for result_drawn in results for row in result_drawn.result.rows]
    cases, names = distinct(rows, "case"), distinct(rows, "scheduler")
    fig, axes = panels(1, 2, figsize=(9, 0.62 * len(cases) + 2.4), sharey=True)
    shown = {"ttft_p50_s": "median time to first token, s", "tbt_p99_s": "P99 time between tokens, s"}
    for column, (ax, (measure, label)) in enumerate(zip(axes, shown.items(), strict=True)):
        for (case_index, case), (line, name) in product(enumerate(cases), enumerate(names)):
            position = case_index + 0.17 * (line - (len(names) - 1) / 2)
            for result_drawn in results:
                labels = scheduler_labels(name) | {"case": case}
                entry = result_drawn.result.summary.get(measure, **labels)
                if result_drawn.library is not None and entry == result_drawn.library.summary.get(measure, **labels):
                    continue
                result_drawn.point(ax, position + result_drawn.shift / 4, entry, look_of(name), along="x")
            paper = PAPER_LOADS.get(case, {}).get(name, (None, None))[column]
            if paper is not None:
                ax.plot(paper, position, "|", ms=15, mew=4, color=COLOURS["paper"], alpha=0.6, zorder=1)
        ax.set(xscale="log", xlabel=f"{label} (simulated)")
        log_ticks(ax.xaxis)
    axes[0].set_yticks(range(len(cases)), [_short(case) for case in cases])
    axes[0].set_ylim(len(cases) - 0.4, -0.6)
    name_schedulers(axes[0], names)
    axes[0].plot([], [], "|", ms=12, mew=4, color=COLOURS["paper"], alpha=0.6, label="paper (Table 4)")
    fig.suptitle(_load_message((recorded or now).summary, cases))
    legend(fig, axes[0], results, "tbt_p99_s", size="small")
    return fig


def _load_message(summary: Summary, cases: Sequence[str]) -> str:
    """Say by load how much longer the tail of whole prompts beside decodes is than that of chunks."""
    ratios = []
    for case in cases:
        chunks = summary.all("tbt_p99_s", scheduler="sarathi", case=case)
        unchunked = summary.get("tbt_p99_s", scheduler="hybrid_only", case=case)
        ratios += [unchunked["value"] / entry["value"] for entry in chunks if unchunked]
    if not ratios:
        return "Time to first token and between tokens at one load"
    return (
        f"With whole prompts the longest waits between tokens are {min(ratios):.1f} to {max(ratios):.1f} times as long"
    )


def _short(case: str) -> str:
    _, lengths, rate = case.split(", ")
    return f"{lengths.partition('-')[0]}\n{rate}"


def load_rows(result: Result) -> Table:
    """A line a load and scheduler: both times, and the paper's."""
    columns = {"ttft_p50_s": "median TTFT, s", "tbt_p99_s": "P99 TBT, s"}
    for case, name in product(distinct(result.rows, "case"), distinct(result.rows, "scheduler")):
        paper: Sequence[float | None] = PAPER_LOADS.get(case, {}).get(name, (None, None))
        line: dict[str, Any] = {"load": f"{case}: {told(name)}"}
        for (measure, label), theirs in zip(columns.items(), paper, strict=True):
            line[label] = interval(result.summary.get(measure, **scheduler_labels(name), case=case), 2)
            line[f"paper: {label}"] = "" if theirs is None else f"{theirs:g}"
        yield line
