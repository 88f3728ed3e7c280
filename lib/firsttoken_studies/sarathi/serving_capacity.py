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
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import Interval, bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.sarathi.bench import Bench, CapacityConfig
from firsttoken_studies.sarathi.leaderboard import BASE


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
    summary = Summary()
    found = [row for row in rows if row["what"] == "capacity"]
    for objective in parameters["capacity"]["objectives"]:
        here = [row for row in found if row["objective"] == objective]
        by = {name: [row["requests_per_s"] for row in here if row["scheduler"] == name] for name in _names(here)}
        for name, rates in by.items():
            where = place_of(name) | {"objective": objective}
            summary.add("capacity_requests_per_s", bootstrap(rates).summary("requests/s"), **where)
            if BASE in by and name != BASE and min(by[BASE]) > 0:
                summary.add("capacity_x", _over(rates, by[BASE]).summary("x"), **where, than=BASE)
        fixed = [rates for name, rates in by.items() if name.startswith("sarathi ")]
        if "adaptive_budget" in by and fixed:
            over = _over(by["adaptive_budget"], np.max(fixed, axis=0)).summary("x")
            summary.add("capacity_x", over, scheduler="adaptive_budget", objective=objective, than="best fixed")
    held = [row["step_max_s"] / row["budget_step_s"] for row in found if "budget_step_s" in row and "step_max_s" in row]
    if held:
        worst = {"value": max(held), "n": len(held), "unit": "x"}
        summary.add("step_x", worst, than="step of the budget", across="worst")
    ablated = [row for row in rows if row["what"] == "ablation"]
    for name in _names(ablated):
        for column, unit in (("ttft_p50_s", "s"), ("tbt_p99_s", "s")):
            values = [row[column] for row in ablated if row["scheduler"] == name]
            summary.add(column, bootstrap(values).summary(unit), **place_of(name), case="ablation")
    return summary


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["scheduler"] for row in rows))


def _over(rates: list[float], others: np.ndarray | list[float]) -> Interval:
    """The ratio of mean capacities; seeds are resampled, each with both its runs."""
    return bootstrap(np.column_stack([rates, others]), lambda sample: float(np.divide(*sample.mean(0))))
