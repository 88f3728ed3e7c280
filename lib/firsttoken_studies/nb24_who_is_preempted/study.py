"""Who is preempted, beside how: every rule for the victim with every way back, under two schedulers and three loads.

CPS preempts the request that came last (its section 2.2) and chooses how it comes back. Which request gives way is a
choice of its own, which no report compares.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from firsttoken.cps.policies import make_policy
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.preemption import PreemptionPolicy
from firsttoken.engine.request import Request
from firsttoken.engine.scheduler_state import VICTIMS, Victim
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, share_below
from firsttoken.study.summary import Summary
from firsttoken_studies.cps.live_loads import LiveLoadsConfig, served
from firsttoken_studies.nb22_cross_point_scheduler.study import HOST_BLOCKS, ReplayedConfig, calibrated, drawn
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import LOOKS, Figure, categories, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table
from firsttoken_studies.record.show import cells

LIFO, FREED, RANDOM = "last_arrived", "most_freed_for_its_cost", "random"
RULES = (*VICTIMS, FREED, RANDOM)
RECOVERIES = ("swap", "recompute", "cross_point")
SCHEDULERS: dict[str, dict[str, Any]] = {
    "prefill_first": {"scheduler": "prefill_first", "prefill_tokens": 2560, "token_budget": 1 << 20},
    "sarathi 512": {"scheduler": "sarathi", "token_budget": 512, "requests": 256},
}
TOLD = {
    LIFO: "the last that came (LIFO)",
    "first_arrived": "the first that came",
    "longest": "the one with most tokens",
    "shortest": "the one with fewest tokens",
    FREED: "most blocks freed for its cost",
    RANDOM: "drawn at random",
}


@dataclass(frozen=True)
class VictimsConfig:
    """``seeds`` draws of ``short`` + ``long`` conversations, all at once into each of ``pools`` KV blocks of 16 tokens:
    the fewer blocks, the more requests give way. Each of ``victims`` runs with each of ``recoveries`` under each of
    ``schedulers``."""

    seeds: int
    short: int
    long: int
    pools: tuple[int, ...]
    victims: tuple[str, ...]
    recoveries: tuple[str, ...]
    schedulers: tuple[str, ...]

    def __post_init__(self) -> None:
        if min(self.seeds, self.short, self.long, *self.pools) < 1:
            raise ProfileError("victims: seeds, short, long and pools must be at least 1")
        for names, known_names, kind in (
            (self.victims, RULES, "victim"),
            (self.recoveries, RECOVERIES, "recovery"),
            (self.schedulers, SCHEDULERS, "scheduler"),
        ):
            if unknown_name := next((name for name in names if name not in known_names), ""):
                raise ProfileError(f"victims: no {kind} {unknown_name!r}; {unknown(unknown_name, known_names)}")


def victim_of(name: str, costs: Costs, seed: int) -> str | Victim:
    """Return the victim rule called ``name``: the engine's own, or one that needs ``costs`` or a ``seed``."""
    if name == RANDOM:
        chance = random.Random(seed)
        return lambda running: chance.choice(running)
    if name == FREED:

        def freed_for_its_cost(request: Request) -> tuple[float, int]:
            swap_s = costs.swap_out_s(request.cached) + costs.swap_in_s(request.cached)
            cheapest_s = min(swap_s, costs.step_s([(0, request.cached)], []))
            return len(request.blocks) / cheapest_s, request.order

        return lambda running: max(running, key=freed_for_its_cost)
    return name


METRICS = ("p99_tpot_ms", "mean_ttft_ms", "longest_gap_s", "preemptions")
MEASURES = {  # of the summary: its column of the rows, and the unit
    "tpot_p99_ms": ("p99_tpot_ms", "ms"),
    "longest_gap_s": ("longest_gap_s", "s"),
    "preemptions": ("preemptions", ""),
}


def victims(profile: Profile) -> Outcome:
    """Rows {blocks, scheduler, recovery, victim, seeds, and for each of ``METRICS`` a list by seed}, on the costs of
    CPS's Table 2."""
    config = profile.section("victims", VictimsConfig)
    set_up = ReplayedConfig(config.seeds, config.short, config.long, max(config.pools), (), ())
    seeds = list(range(profile.seed, profile.seed + config.seeds))
    loads = {seed: drawn(set_up, seed) for seed in seeds}
    costs = PublishedCosts(decode_s=calibrated([loads[seed] for seed in seeds[:3]], max(config.pools)))
    named = ("blocks", "scheduler", "recovery", "victim")
    every = product(config.pools, config.schedulers, config.recoveries, config.victims)
    cases = [dict(zip(named, case, strict=True)) for case in every]
    rows: Rows = []
    for case in track(cases, desc="victims"):
        runs = [run_with(loads[seed], costs, case | {"seed": seed}) for seed in seeds]
        rows.append(case | {"seeds": seeds} | {name: [round(run[name], 4) for run in runs] for name in METRICS})
    source = "ShareGPT lengths on the costs of CPS Table 2; no model runs"
    return Outcome(rows, provenance={"source": source, "kind": "replayed"})


def run_with(items: Sequence[Item], costs: Costs, case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what clients saw of one case, and the longest time that a request waited for its next token."""
    executor = SimulatedExecutor(costs, case["blocks"], host_blocks=HOST_BLOCKS)
    victim = victim_of(case["victim"], costs, case["seed"])
    settings = EngineConfig(victim=victim, watermark=0.0, **SCHEDULERS[case["scheduler"]])
    return seen(executor, settings, make_policy(case["recovery"]), items)


def seen(executor: Executor, settings: EngineConfig, policy: PreemptionPolicy, items: Sequence[Item]) -> dict[str, Any]:
    """The metrics of one run, and the longest time between two tokens of any request."""
    metrics, requests, _ = served(executor, settings, policy, items)
    gaps = [float(np.diff(request.times_s).max()) for request in requests if len(request.times_s) > 1]
    return metrics | {"longest_gap_s": max(gaps)}


@dataclass(frozen=True)
class LiveVictimsConfig(LiveLoadsConfig):
    """Settings of the live runs: each of ``victims`` with each of ``recoveries``, in random order."""

    victims: tuple[str, ...]
    recoveries: tuple[str, ...]

    section = "live_victims"

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown_name := next((name for name in self.victims if name not in VICTIMS), ""):
            raise ProfileError(f"live_victims: no victim {unknown_name!r}; {unknown(unknown_name, VICTIMS)}")


def victims_live(profile: Profile) -> Outcome:
    """Measure each victim rule with each recovery on the profile's model on this machine, prefill first; rows as
    simulated."""
    config = profile.section("live_victims", LiveVictimsConfig)
    loaded, seeds = config.load(profile, profile.model), range(profile.seed, profile.seed + config.seeds)
    loads = config.loads(loaded, seeds)
    cases = list(product(seeds, config.victims, config.recoveries))
    random.Random(profile.seed).shuffle(cases)
    runs: dict[tuple[int, str, str], dict[str, Any]] = {}
    with closing(config.executor(loaded)) as executor:
        for seed, victim, recovery in track(cases, desc="live victims"):
            settings = EngineConfig(victim=victim, watermark=0.0)
            runs[seed, victim, recovery] = seen(executor, settings, config.policy(recovery), loads[seed])
    rows: Rows = [
        {"blocks": config.blocks, "scheduler": "prefill_first", "recovery": recovery, "victim": victim}
        | {"seeds": list(seeds)}
        | {name: [round(runs[seed, victim, recovery][name], 4) for seed in seeds] for name in METRICS}
        for victim, recovery in product(config.victims, config.recoveries)
    ]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def victims_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The mean P99 TPOT and the longest wait of each case, and how far its P99 TPOT lies below that of the last that
    came with the same recovery, and below that of LIFO with cross-point, on the same draws."""
    summary = Summary()
    cases = {(row["blocks"], row["scheduler"], row["recovery"], row["victim"]): row for row in rows}
    for (blocks, scheduler, recovery, victim), case_rows in cases.items():
        labels = {"case": f"{blocks} blocks", "scheduler": scheduler, "policy": recovery, "variant": victim}
        for measure, (column, unit) in MEASURES.items():
            summary.add(measure, bootstrap(case_rows[column]).summary(unit), **labels)
        for than, other in ((f"{LIFO} {recovery}", recovery), (f"{LIFO} cross_point", "cross_point")):
            base = cases.get((blocks, scheduler, other, LIFO))
            if base is None or base is case_rows or summary.get("tpot_p99_below_pct", **labels, than=than):
                continue
            below = share_below(case_rows["p99_tpot_ms"], base["p99_tpot_ms"])
            summary.add("tpot_p99_below_pct", below.summary("%", 100), **labels, than=than)
    return summary


def victim_rows(result: Result) -> Table:
    """A line a load, scheduler and rule: P99 TPOT by recovery, and the longest wait with swap."""
    recoveries = dict.fromkeys(row["recovery"] for row in result.rows)
    columns = {f"P99 TPOT, {name}, ms": ("tpot_p99_ms", 0, {"policy": name}) for name in recoveries}
    columns |= {"longest wait, swap, s": ("longest_gap_s", 1, {"policy": "swap"})}
    for blocks, scheduler, victim in dict.fromkeys((r["blocks"], r["scheduler"], r["victim"]) for r in result.rows):
        labels = {"case": f"{blocks} blocks", "scheduler": scheduler, "variant": victim}
        load = f"{blocks} blocks, {scheduler}: {TOLD[victim]}"
        yield {"load": load} | cells(result.summary, columns, **labels)


def by_victim(recorded: Result | None, now: Result) -> Figure:
    """P99 TPOT by rule, a panel a scheduler and load, a mark a recovery."""
    drawn_over = over(recorded, now)
    every = [row for shown in drawn_over for row in shown.result.rows]
    schedulers = list(dict.fromkeys(row["scheduler"] for row in every))
    pools = sorted({row["blocks"] for row in every}, reverse=True)
    rules = list(dict.fromkeys(row["victim"] for row in every))
    size = (9, 0.3 * len(rules) * len(pools) + 2.4)
    fig, axes = panels(len(pools), len(schedulers), figsize=size, sharex="col", sharey=True, squeeze=False)
    for line, blocks in zip(axes, pools, strict=True):
        for ax, scheduler in zip(line, schedulers, strict=True):
            for shown in drawn_over:
                for index, victim in enumerate(rules):
                    for offset, recovery in zip((-0.22, 0.0, 0.22), RECOVERIES, strict=True):
                        labels = {"case": f"{blocks} blocks", "scheduler": scheduler, "policy": recovery}
                        entry = shown.result.summary.get("tpot_p99_ms", **labels, variant=victim)
                        shown.point(ax, index + offset + shown.shift / 3, entry, recovery.replace("_", "-"), along="x")
            ax.set_title(f"{scheduler}, {blocks} blocks", fontsize="small")
            categories(ax, [TOLD[victim] for victim in rules], 0.4, fontsize="small")
    for ax in axes[-1]:
        ax.set_xlabel("P99 of the time per further token, ms")
    for recovery in RECOVERIES:
        look = LOOKS[recovery.replace("_", "-")]
        axes[0][0].plot([], [], linestyle="none", marker=look.marker, color=look.colour, label=recovery)
    fig.suptitle(_message((recorded or now).summary))
    names = fig.legend(loc="outside lower center", ncols=3, fontsize="small")
    name_results(fig, drawn_over, "tpot_p99_ms", legend=names)
    return fig


def _message(summary: Summary) -> str:
    """Say how far the best rule with plain swap lies below LIFO with cross-point, over the loads of the first
    scheduler."""
    than = f"{LIFO} cross_point"
    entries = summary.all("tpot_p99_below_pct", policy="swap", than=than)
    first = [entry for entry in entries if entry["where"]["scheduler"] == entries[0]["where"]["scheduler"]]
    best: dict[str, float] = {}
    for entry in first:
        rule = entry["where"]["variant"]
        best[rule] = min(best.get(rule, np.inf), entry["value"])
    if not best:
        return "The tail by who gives way and how it comes back"
    rule = max(best, key=lambda name: best[name])
    most = max(entry["value"] for entry in first if entry["where"]["variant"] == rule)
    return f"Swap alone, of {TOLD[rule]}, has its tail {best[rule]:.0f} to {most:.0f} % below LIFO with cross-point"
