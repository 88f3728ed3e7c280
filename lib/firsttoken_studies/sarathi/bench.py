"""One cost table and one sample of lengths, on which every scheduler is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from firsttoken.engine.engine import Engine
from firsttoken.engine.latency_metrics import serve_items
from firsttoken.engine.request import Request
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload.traces import RequestTrace
from firsttoken.engine.workload.workload_items import Item
from firsttoken.sarathi.capacity import TIMES, ClientTimes, Objective, capacity
from firsttoken.sarathi.hardware import Hardware
from firsttoken.sarathi.lengths import lengths, replayed, workload
from firsttoken.sarathi.policy import Policy
from firsttoken.study.errors import CorpusError, ProfileError


@dataclass(frozen=True)
class CapacityConfig:
    """``requests`` of ``lengths`` for each of ``seeds`` draws, at most ``batch`` at once. Where ``arrivals`` is the
    file of a published trace, requests and the pattern of their arrivals are the trace's.

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

    def __post_init__(self) -> None:
        if min(self.requests, self.seeds, self.batch) < 1 or min(self.start, self.rate) <= 0:
            raise ProfileError("capacity: requests, seeds and batch must be at least 1, start and rate above 0")
        if odd := set(self.objectives) - TIMES.keys():
            raise ProfileError(f"capacity: no objective {min(odd)!r}; known: {', '.join(TIMES)}")


class Bench:
    """Requests that are longer than the KV blocks are left out. Where a ``trace`` is given, the requests are its own.

    Raises AssetError and CorpusError for costs or lengths that are not there, or cannot be read.
    """

    def __init__(self, config: CapacityConfig, hardware: Hardware, trace: RequestTrace | None = None) -> None:
        self.config, self.hardware, self.trace = config, hardware, trace
        self.costs = hardware.read()
        if trace is not None:
            fitting = tuple(item for item in trace.items if item.total_tokens <= hardware.tokens)
            if len(fitting) < 2:
                raise CorpusError(
                    f"{len(fitting)} requests of the trace fit into {hardware.tokens:,} tokens; take another"
                )
            self.trace = replace(trace, items=fitting)
            self.pairs = np.array([(item.prompt_tokens, item.output_tokens) for item in fitting])
        else:
            pairs = lengths(config.lengths)
            self.pairs = pairs[pairs.sum(1) <= hardware.tokens]
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
            engine = Engine(
                SimulatedExecutor(self.costs, self.hardware.blocks),
                policy.config(objective, self.config.batch),
                trace=trace,
            )
            return serve_items(engine, self.requests(seed, rate)), trace

    def serve(self, policy: Policy, objective: Objective, seed: int, rate: float) -> tuple[ClientTimes, float]:
        """What clients saw, and the longest step that also decoded, in s."""
        requests, trace = self.run(policy, objective, seed, rate)
        return ClientTimes.of(requests), max((step.seconds for step in trace.steps if step.contexts), default=0.0)

    def search(
        self, policy: Policy, objective: Objective, seed: int, tried: Callable[[float], object] = lambda rate: None
    ) -> dict[str, Any]:
        """The capacity, and what was served at it; ``tried`` is told each rate."""
        longest_steps: dict[float, float] = {}

        def serve(rate: float) -> ClientTimes:
            served, longest_steps[rate] = self.serve(policy, objective, seed, rate)
            tried(rate)
            return served

        rate, served = capacity(serve, objective, start=self.config.start)
        row: dict[str, Any] = {"requests_per_s": rate, "trials": len(longest_steps)}
        if served is not None:
            row |= served.as_dict() | {"step_max_s": longest_steps[rate]}
        if policy.kind == "sarathi" and policy.budget:
            row["budget_step_s"] = self._budget_step_s(policy.budget)
        return row

    def _budget_step_s(self, budget: int) -> float:
        """What a step of ``budget`` tokens takes at most: the last chunk of the longest prompt beside a full pool."""
        longest = int(self.pairs.sum(1).max())
        decodes = min(self.config.batch, self.hardware.tokens // longest, budget - 1)
        chunk = budget - decodes
        return self.costs.step_s([(max(0, longest - chunk), chunk)], [longest] * decodes)
