"""One cost table and one sample of lengths, on which every scheduler is tried: capacity by scheduler and objective
(Figures 10 to 12), and Sarathi's two halves at one rate (Table 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from firsttoken.engine.engine import Engine
from firsttoken.engine.request import Request
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload_items import Item, serve_items
from firsttoken.sarathi.capacity import STRICT, TIMES, ClientTimes, Objective, capacity
from firsttoken.sarathi.policy import Policy, scheduler_labels
from firsttoken.simulation.hardware import Hardware
from firsttoken.simulation.lengths import lengths, replayed, workload
from firsttoken.simulation.stack import Stack
from firsttoken.simulation.workload.traces import RequestTrace, load_trace
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows, frame_of
from firsttoken_studies.sarathi.leaderboard import add_capacities

Search: TypeAlias = Callable[[Callable[[float], Sequence[Request]], float, float], tuple[float, Sequence[float]]]
"""A function of (serve, tbt_s, start): ``serve(rate)`` gives the requests that were served, ``tbt_s`` is the limit on
the P99 between two tokens. It returns the capacity, 0 where no rate is within the limits, and the rates tried."""


def search_capacity(
    serve: Callable[[float], Sequence[Request]], tbt_s: float, start: float
) -> tuple[float, Sequence[float]]:
    """Search the capacity by the library's rule, as a ``Search`` does."""
    tried: list[float] = []

    def times(rate: float) -> ClientTimes:
        tried.append(rate)
        return ClientTimes.of(serve(rate))

    return capacity(times, Objective(tbt_s), start=start)[0], tried


@dataclass(frozen=True)
class CapacityConfig:
    """``requests`` of ``lengths`` for each of ``seeds`` draws, at most ``batch`` at once. Where ``arrivals`` is the
    file of a published trace, requests and the pattern of their arrivals are the trace's. ``stack`` is the server
    around the device, one of ``STACKS``.

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
    arrivals: str = ""
    stack: str = "bare"

    def __post_init__(self) -> None:
        if min(self.requests, self.seeds, self.batch) < 1 or min(self.start, self.rate) <= 0:
            raise ProfileError("capacity: requests, seeds and batch must be at least 1, start and rate above 0")
        if unknown := set(self.objectives) - TIMES.keys():
            raise ProfileError(f"capacity: no objective {min(unknown)!r}; known: {', '.join(TIMES)}")


class Bench:
    """The requests and costs on which schedulers are compared. Requests that are longer than the KV blocks or, where
    ``extended`` is not set, than the model's context are left out; ``omitted`` says so. Where a ``trace`` is given, the
    requests are its own, and prompts that begin alike share blocks.

    Raises AssetError and CorpusError for costs or lengths that are not there, or cannot be read.
    """

    def __init__(
        self, config: CapacityConfig, hardware: Hardware, trace: RequestTrace | None = None, *, extended: bool = False
    ) -> None:
        self.config, self.hardware, self.stack = config, hardware, Stack.named(config.stack)
        self.costs = self.stack.around(hardware.read(), hardware.gpus)
        most = hardware.tokens if extended else hardware.longest
        self.trace = trace.up_to(most) if trace else None
        items = trace.items if trace else ()
        pairs = (
            np.array([(item.prompt_tokens, item.output_tokens) for item in items]) if trace else lengths(config.lengths)
        )
        self.pairs = pairs[pairs.sum(1) <= most]
        self.omitted = ""
        if count := len(pairs) - len(self.pairs):
            limit = "the KV blocks hold" if most == hardware.tokens else "its context has"
            self.omitted = (
                f"{count:,} of {len(pairs):,} requests left out: each has more than the {most:,} tokens that {limit}"
            )
        if len(self.pairs) < 2:
            raise CorpusError(f"{len(self.pairs)} requests fit; {self.omitted}; take another trace, or a larger card")
        self.iteration_s = hardware.iteration_s(self.costs)

    def requests(self, seed: int, rate: float) -> tuple[Item, ...]:
        """The requests of ``seed`` at ``rate`` requests a second."""
        if self.trace is not None:
            return replayed(self.trace, self.config.requests, seed, rate)
        return workload(self.pairs, self.config.requests, seed, rate)

    def objective(self, name: str) -> Objective:
        """The strict or the relaxed one."""
        return Objective(TIMES[name] * self.iteration_s)

    def run(self, policy: Policy, objective: Objective, seed: int, rate: float) -> tuple[list[Request], Trace]:
        """Serve the requests of ``seed`` at ``rate`` requests a second; they, and every step.

        Raises ProfileError for a policy of a file that does what it may not, or never ends.
        """
        trace = Trace()
        with policy.judged():
            settings = replace(
                policy.config(objective, self.config.batch),
                share_prefixes=bool(self.trace and self.trace.hashes),
                prefill_tokens=self.stack.prompt_tokens,
            )
            engine = Engine(SimulatedExecutor(self.costs, self.hardware.blocks), settings, trace=trace)
            return serve_items(engine, self.requests(seed, rate)), trace

    def serve(self, policy: Policy, objective: Objective, seed: int, rate: float) -> tuple[ClientTimes, float]:
        """Serve the requests of ``seed``; return the times that clients saw, and the longest step that also decoded, in
        s."""
        requests, trace = self.run(policy, objective, seed, rate)
        return ClientTimes.of(requests), _longest_step_s(trace)

    def search(
        self,
        policy: Policy,
        objective: Objective,
        seed: int,
        tried: Callable[[float], object] = lambda rate: None,
        search: Search = search_capacity,
    ) -> dict[str, Any]:
        """The capacity by ``search``, and what was served at it; ``tried`` is told each rate."""
        served: dict[float, dict[str, float]] = {}

        def serve(rate: float) -> list[Request]:
            requests, trace = self.run(policy, objective, seed, rate)
            served[rate] = asdict(ClientTimes.of(requests)) | {"step_max_s": _longest_step_s(trace)}
            tried(rate)
            return requests

        rate, _ = search(serve, objective.tbt_s, self.config.start)
        row: dict[str, Any] = {"requests_per_s": rate, "trials": len(served)} | served.get(rate, {})
        if policy.kind == "sarathi" and policy.budget:
            row["budget_step_s"] = self._budget_step_s(policy.budget)
        return row

    def _budget_step_s(self, budget: int) -> float:
        """Return the longest time of a step of ``budget`` tokens, in s: the last chunk of the longest prompt beside a
        full pool."""
        longest = int(self.pairs.sum(1).max())
        decodes = min(self.config.batch, self.hardware.tokens // longest, budget - 1)
        chunk = budget - decodes
        return self.costs.step_s([(max(0, longest - chunk), chunk)], [longest] * decodes)


def _longest_step_s(trace: Trace) -> float:
    return max((step.seconds for step in trace.steps if step.contexts), default=0.0)


def serving_capacity(profile: Profile, *, search: Search = search_capacity) -> Outcome:
    """Rows {what: capacity, seed, objective, scheduler, requests_per_s, ...} and {what: ablation, seed, ...}.

    ``step_max_s`` is the longest step that also decoded, ``budget_step_s`` what a step of the budget takes at most.
    ``search`` finds the capacities: a reader's in place of the library's.
    """
    config, hardware = profile.section("capacity", CapacityConfig), profile.section("hardware", Hardware)
    bench = Bench(config, hardware, load_trace(config.arrivals) if config.arrivals else None)
    seeds = range(profile.seed, profile.seed + config.seeds)
    cases = [(seed, name, budget) for seed in seeds for name in config.objectives for budget in config.schedulers]
    rows: Rows = []
    for seed, name, scheduler in track(cases, desc="capacity"):
        objective, row = bench.objective(name), {"what": "capacity", "seed": seed, "objective": name}
        capacity = bench.search(Policy.named(scheduler), objective, seed, search=search)
        rows.append(row | {"scheduler": scheduler, "tbt_s": objective.tbt_s} | capacity)
    for seed in seeds:
        for scheduler in config.ablation:
            served, _ = bench.serve(Policy.named(scheduler), bench.objective(STRICT), seed, config.rate)
            rows.append({"what": "ablation", "seed": seed, "scheduler": scheduler} | asdict(served))
    floors = {"decode_iteration": {"value": bench.iteration_s, "unit": "s", "why": "a step that only decodes"}}
    provenance = hardware.provenance(bench.costs) | ({"omitted": bench.omitted} if bench.omitted else {})
    return Outcome(rows, floors, provenance=provenance)


def capacity_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Capacities, their ratios by seed to the prefill-first scheduler's and to the best fixed budget's, and Table 4."""
    summary, capacities, ablated = Summary(), frame_of(rows, what="capacity"), frame_of(rows, what="ablation")
    for objective in parameters["capacity"]["objectives"]:
        by = add_capacities(summary, capacities[capacities.objective == objective], objective=objective)
        fixed = [rates for name, rates in by.items() if name.startswith("sarathi ")]
        if "adaptive_budget" in by and fixed:
            ratio = ratio_of_means(by["adaptive_budget"], np.max(fixed, axis=0)).summary("x")
            summary.add("capacity_x", ratio, scheduler="adaptive_budget", objective=objective, than="best fixed")
    held = (
        (capacities.step_max_s / capacities.budget_step_s).dropna()
        if {"step_max_s", "budget_step_s"} <= {*capacities}
        else ()
    )
    if len(held):
        worst = {"value": held.max(), "n": len(held), "unit": "x"}
        summary.add("step_x", worst, than="step of the budget", across="worst")
    times = {name: (name, "mean", "s") for name in ("ttft_p50_s", "tbt_p99_s")}
    for name, scheduler_rows in ablated.groupby("scheduler", sort=False) if len(ablated) else ():
        summary.by(scheduler_rows, {}, times, **scheduler_labels(name), case="ablation")
    return summary
