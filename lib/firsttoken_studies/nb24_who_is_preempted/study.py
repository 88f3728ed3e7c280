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
from firsttoken.engine.preemption.victims import VICTIMS, Drawn, Victim, first_arrived, last_arrived, victim_named
from firsttoken.engine.request import Request
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
from firsttoken_studies.record.results import Outcome, Rows

LIFO, FREED, RANDOM = "last_arrived", "most_freed_for_its_cost", "random"
RULES = (*VICTIMS, FREED)
RECOVERIES = ("swap", "recompute", "cross_point")
SCHEDULERS: dict[str, dict[str, Any]] = {
    "prefill_first": {"scheduler": "prefill_first", "prefill_tokens": 2560, "token_budget": 1 << 20},
    "sarathi 512": {"scheduler": "sarathi", "token_budget": 512, "requests": 256},
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


def victim_of(name: str, costs: Costs, seed: int, own: Mapping[str, Victim] | None = None) -> Victim:
    """Return the victim rule called ``name``: one of a reader's ``own``, one that needs ``costs`` or a ``seed``, or the
    engine's."""
    if name == RANDOM:
        return Drawn(seed)
    if name == FREED:

        def freed_for_its_cost(request: Request) -> tuple[float, int]:
            swap_s = costs.swap_out_s(request.cached) + costs.swap_in_s(request.cached)
            cheapest_s = min(swap_s, costs.step_s([(0, request.cached)], []))
            return len(request.blocks) / cheapest_s, request.order

        return lambda running: max(running, key=freed_for_its_cost)
    return (own or {}).get(name) or victim_named(name)


METRICS = ("p99_tpot_ms", "mean_ttft_ms", "longest_gap_s", "preemptions")
MEASURES = {  # of the summary: its column of the rows, and the unit
    "tpot_p99_ms": ("p99_tpot_ms", "ms"),
    "longest_gap_s": ("longest_gap_s", "s"),
    "preemptions": ("preemptions", ""),
}


def victims(
    profile: Profile,
    *,
    last_that_came: Victim = last_arrived,
    first_that_came: Victim = first_arrived,
) -> Outcome:
    """Rows {blocks, scheduler, recovery, victim, seeds, and for each of ``METRICS`` a list by seed}, on the costs of
    CPS's Table 2. Both rules may be a reader's, in place of the engine's."""
    config = profile.section("victims", VictimsConfig)
    set_up = ReplayedConfig(config.seeds, config.short, config.long, max(config.pools), (), ())
    seeds = list(range(profile.seed, profile.seed + config.seeds))
    loads = {seed: drawn(set_up, seed) for seed in seeds}
    costs = PublishedCosts(decode_s=calibrated([loads[seed] for seed in seeds[:3]], max(config.pools)))
    named = ("blocks", "scheduler", "recovery", "victim")
    every = product(config.pools, config.schedulers, config.recoveries, config.victims)
    cases = [dict(zip(named, case, strict=True)) for case in every]
    own = {LIFO: last_that_came, "first_arrived": first_that_came}
    rows: Rows = []
    for case in track(cases, desc="victims"):
        runs = [run_with(loads[seed], costs, case | {"seed": seed}, own) for seed in seeds]
        rows.append(case | {"seeds": seeds} | {name: [round(run[name], 4) for run in runs] for name in METRICS})
    source = "ShareGPT lengths on the costs of CPS Table 2; no model runs"
    return Outcome(rows, provenance={"source": source, "kind": "replayed"})


def run_with(
    items: Sequence[Item], costs: Costs, case: Mapping[str, Any], own: Mapping[str, Victim] | None = None
) -> dict[str, Any]:
    """Return what clients saw of one case, and the longest time that a request waited for its next token."""
    executor = SimulatedExecutor(costs, case["blocks"], host_blocks=HOST_BLOCKS)
    victim = victim_of(case["victim"], costs, case["seed"], own)
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
