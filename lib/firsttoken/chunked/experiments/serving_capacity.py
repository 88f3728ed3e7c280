"""Capacity by scheduler and objective (Figures 10 to 12), and Sarathi's two halves at one rate (Table 4): simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.chunked.capacity import Objective, Served, capacity
from firsttoken.chunked.hardware import Hardware
from firsttoken.chunked.lengths import lengths, workload
from firsttoken.chunked.policy import engine_config
from firsttoken.engine.engine import Engine
from firsttoken.engine.metrics import serve_items
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.trace import Trace
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import Interval, bootstrap

STRICT, RELAXED = "strict", "relaxed"
TIMES = {STRICT: 5, RELAXED: 25}  # a decode iteration (Table 3)
BASE = "prefill_first"
SARATHI = {STRICT: "sarathi 512", RELAXED: "sarathi 2048"}  # the budgets of 5.1


@dataclass(frozen=True)
class CapacityConfig:
    """``requests`` of ``lengths`` for each of ``seeds`` draws, at most ``batch`` at once.

    The search starts at ``start`` requests a second. The ``ablation`` schedulers serve ``rate`` requests a second.
    """

    lengths: str
    requests: int
    seeds: int
    batch: int
    start: float
    schedulers: tuple[str, ...]
    objectives: tuple[str, ...]
    ablation: tuple[str, ...]
    rate: float

    def __post_init__(self) -> None:
        if min(self.requests, self.seeds, self.batch) < 1 or min(self.start, self.rate) <= 0:
            raise ProfileError("capacity: requests, seeds and batch must be at least 1, start and rate above 0")
        if odd := set(self.objectives) - TIMES.keys():
            raise ProfileError(f"capacity: no objective {min(odd)!r}; known: {', '.join(TIMES)}")


class Bench:
    """One cost table and one sample of lengths, on which every scheduler is tried."""

    def __init__(self, config: CapacityConfig, hardware: Hardware) -> None:
        self.config, self.hardware = config, hardware
        self.costs = hardware.read()
        pairs = lengths(config.lengths)
        self.pairs = pairs[pairs.sum(1) <= hardware.tokens]
        self.iteration_s = hardware.iteration_s(self.costs)

    def objective(self, name: str) -> Objective:
        """The strict or the relaxed one."""
        return Objective(TIMES[name] * self.iteration_s)

    def serve(self, scheduler: str, objective: Objective, seed: int, rate: float) -> tuple[Served, float]:
        """What clients saw, and the longest step that also decoded, in s."""
        trace = Trace()
        executor = SimulatedExecutor(self.costs, self.hardware.blocks)
        engine = Engine(executor, engine_config(scheduler, objective, self.config.batch), trace=trace)
        requests = serve_items(engine, workload(self.pairs, self.config.requests, seed, rate))
        return Served.of(requests), max((step.seconds for step in trace.steps if step.contexts), default=0.0)

    def search(self, scheduler: str, objective: Objective, seed: int) -> dict[str, Any]:
        """The capacity, and what was served at it."""
        longest_steps: dict[float, float] = {}

        def serve(rate: float) -> Served:
            served, longest_steps[rate] = self.serve(scheduler, objective, seed, rate)
            return served

        rate, served = capacity(serve, objective, start=self.config.start)
        row: dict[str, Any] = {"requests_per_s": rate, "trials": len(longest_steps)}
        if served is not None:
            row |= served.as_dict() | {"step_max_s": longest_steps[rate]}
        if scheduler.startswith("sarathi "):
            row["budget_step_s"] = self._budget_step_s(int(scheduler.split()[1]))
        return row

    def _budget_step_s(self, budget: int) -> float:
        """What a step of ``budget`` tokens takes at most: the last chunk of the longest prompt beside a full pool."""
        longest = int(self.pairs.sum(1).max())
        decodes = min(self.config.batch, self.hardware.tokens // longest, budget - 1)
        chunk = budget - decodes
        return self.costs.step_s([(max(0, longest - chunk), chunk)], [longest] * decodes)


def serving_capacity(profile: Profile) -> Outcome:
    """Rows {what: capacity, seed, objective, scheduler, requests_per_s, ...} and {what: ablation, seed, ...}.

    ``step_max_s`` is the longest step that also decoded, ``budget_step_s`` what a step of the budget takes at most.
    """
    config, hardware = profile.section("capacity", CapacityConfig), profile.section("hardware", Hardware)
    bench = Bench(config, hardware)
    seeds = range(profile.seed, profile.seed + config.seeds)
    cases = [(seed, name, each) for seed in seeds for name in config.objectives for each in config.schedulers]
    rows: Rows = []
    for seed, name, scheduler in tqdm(cases, desc="capacity", disable=None):
        row = {"what": "capacity", "seed": seed, "objective": name, "scheduler": scheduler}
        rows.append(row | {"tbt_s": bench.objective(name).tbt_s} | bench.search(scheduler, bench.objective(name), seed))
    for seed in seeds:
        for scheduler in config.ablation:
            served, _ = bench.serve(scheduler, bench.objective(STRICT), seed, config.rate)
            rows.append({"what": "ablation", "seed": seed, "scheduler": scheduler} | served.as_dict())
    floors = {"decode_iteration": {"value": bench.iteration_s, "unit": "s", "why": "a step that only decodes"}}
    return Outcome(rows, floors, provenance=hardware.provenance(bench.costs))


def capacity_summary(rows: Rows, parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Capacities, their ratios by seed to the prefill-first scheduler's and to the best fixed budget's, and Table 4."""
    measures: dict[str, dict[str, Any]] = {}
    found = [row for row in rows if row["what"] == "capacity"]
    for objective in parameters["capacity"]["objectives"]:
        here = [row for row in found if row["objective"] == objective]
        by = {name: [row["requests_per_s"] for row in here if row["scheduler"] == name] for name in _names(here)}
        for name, rates in by.items():
            measures[f"{_key(name)}_{objective}_requests_per_s"] = bootstrap(rates).summary("requests/s")
            if BASE in by and name != BASE and min(by[BASE]) > 0:
                measures[f"{_key(name)}_{objective}_x"] = _over(rates, by[BASE]).summary("x")
        fixed = [rates for name, rates in by.items() if name.startswith("sarathi ")]
        if "adaptive_budget" in by and fixed:
            best = np.max(fixed, axis=0)
            measures[f"adaptive_over_best_fixed_{objective}_x"] = _over(by["adaptive_budget"], best).summary("x")
    held = [row["step_max_s"] / row["budget_step_s"] for row in found if "budget_step_s" in row and "step_max_s" in row]
    if held:
        measures["step_over_budget_step_worst_x"] = {"value": max(held), "n": len(held), "unit": "x"}
    ablated = [row for row in rows if row["what"] == "ablation"]
    for name in _names(ablated):
        for column, unit in (("ttft_p50_s", "s"), ("tbt_p99_s", "s")):
            values = [row[column] for row in ablated if row["scheduler"] == name]
            measures[f"ablation_{_key(name)}_{column}"] = bootstrap(values).summary(unit)
    return measures


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["scheduler"] for row in rows))


def _key(name: str) -> str:
    return name.replace(" ", "_")


def _over(rates: list[float], others: np.ndarray | list[float]) -> Interval:
    """The ratio of mean capacities; seeds are resampled, each with both its runs."""
    return bootstrap(np.column_stack([rates, others]), lambda sample: float(np.divide(*sample.mean(0))))
