"""Capacity by scheduler and objective (Figures 10 to 12), and Sarathi's two halves at one rate (Table 4): simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.engine.workload.traces import load_trace
from firsttoken.sarathi.capacity import STRICT
from firsttoken.sarathi.hardware import Hardware
from firsttoken.sarathi.policy import Policy
from firsttoken.sarathi.policy_text import place_of
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows, frame_of
from firsttoken.study.stats import ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.sarathi.bench import Bench, CapacityConfig
from firsttoken_studies.sarathi.leaderboard import add_capacities


def serving_capacity(profile: Profile) -> Outcome:
    """Rows {what: capacity, seed, objective, scheduler, requests_per_s, ...} and {what: ablation, seed, ...}.

    ``step_max_s`` is the longest step that also decoded, ``budget_step_s`` what a step of the budget takes at most.
    """
    config, hardware = profile.section("capacity", CapacityConfig), profile.section("hardware", Hardware)
    bench = Bench(config, hardware, load_trace(config.arrivals) if config.arrivals else None)
    seeds = range(profile.seed, profile.seed + config.seeds)
    cases = [(seed, name, each) for seed in seeds for name in config.objectives for each in config.schedulers]
    rows: Rows = []
    for seed, name, scheduler in tqdm(cases, desc="capacity", disable=None):
        objective, row = bench.objective(name), {"what": "capacity", "seed": seed, "objective": name}
        found = bench.search(Policy.named(scheduler), objective, seed)
        rows.append(row | {"scheduler": scheduler, "tbt_s": objective.tbt_s} | found)
    for seed in seeds:
        for scheduler in config.ablation:
            served, _ = bench.serve(Policy.named(scheduler), bench.objective(STRICT), seed, config.rate)
            rows.append({"what": "ablation", "seed": seed, "scheduler": scheduler} | served.as_dict())
    floors = {"decode_iteration": {"value": bench.iteration_s, "unit": "s", "why": "a step that only decodes"}}
    return Outcome(rows, floors, provenance=hardware.provenance(bench.costs))


def capacity_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Capacities, their ratios by seed to the prefill-first scheduler's and to the best fixed budget's, and Table 4."""
    summary, found, ablated = Summary(), frame_of(rows, what="capacity"), frame_of(rows, what="ablation")
    for objective in parameters["capacity"]["objectives"]:
        by = add_capacities(summary, found[found.objective == objective], objective=objective)
        fixed = [rates for name, rates in by.items() if name.startswith("sarathi ")]
        if "adaptive_budget" in by and fixed:
            over = ratio_of_means(by["adaptive_budget"], np.max(fixed, axis=0)).summary("x")
            summary.add("capacity_x", over, scheduler="adaptive_budget", objective=objective, than="best fixed")
    held = (found.step_max_s / found.budget_step_s).dropna() if {"step_max_s", "budget_step_s"} <= {*found} else ()
    if len(held):
        worst = {"value": held.max(), "n": len(held), "unit": "x"}
        summary.add("step_x", worst, than="step of the budget", across="worst")
    times = {name: (name, "mean", "s") for name in ("ttft_p50_s", "tbt_p99_s")}
    for name, mine in ablated.groupby("scheduler", sort=False) if len(ablated) else ():
        summary.by(mine, {}, times, **place_of(name), case="ablation")
    return summary
