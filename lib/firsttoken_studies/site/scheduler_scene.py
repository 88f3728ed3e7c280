"""The same requests under any scheduler, as the page "Write a scheduler" serves them in a browser.

It imports the engine and the standard library, and neither numpy nor torch, which are not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from firsttoken.engine.engine import Engine
from firsttoken.engine.request import Sampling
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.sarathi.capacity import Objective
from firsttoken.sarathi.policy import Policy
from firsttoken.simulation.costs.sarathi_artifact import BatchCosts
from firsttoken.study.errors import FirstTokenError

COLUMNS = ("P50 TTFT, s", "P99 TTFT, s", "P99 TBT, ms", "longest gap, ms", "tokens/s")


@dataclass(frozen=True)
class SchedulerScene:
    """``requests`` are seconds of arrival, tokens of the prompt and of the answer. At most ``batch`` of them run at
    once, in ``blocks`` KV blocks of 16 tokens; ``tbt_s`` is the objective for those schedulers that have one."""

    requests: tuple[tuple[float, int, int], ...]
    blocks: int
    batch: int
    tbt_s: float

    def row(self, policy: Policy) -> dict[str, float]:
        """Return the times that the clients saw, by column. Raises ProfileError for what the policy does wrong."""
        with policy.judged():
            config = policy.config(Objective(self.tbt_s), self.batch)
            engine = Engine(SimulatedExecutor(BatchCosts(), self.blocks), config)
            served = engine.serve(
                [((0,) * prompt, Sampling(answer), arrival_s) for arrival_s, prompt, answer in self.requests]
            )
        firsts = [request.ttft_s for request in served]
        gaps = [later - earlier for request in served for earlier, later in pairwise(request.times_s)]
        end = max(request.times_s[-1] for request in served)
        rate = sum(len(request.times_s) for request in served) / (end - self.requests[0][0])
        values = median(firsts), _p99(firsts), 1e3 * _p99(gaps), 1e3 * max(gaps), rate
        return dict(zip(COLUMNS, values, strict=True))


def _p99(values: list[float]) -> float:
    """The 99th percentile as numpy has it, on the line between the two values beside it."""
    return quantiles(values, n=100, method="inclusive")[-1]


def told(scene: Mapping[str, object], policy: str) -> str:
    """The row of ``policy``, a name or a path, as JSON, or {"error": a line}."""
    try:
        return json.dumps(SchedulerScene(**scene).row(Policy.named(policy)))
    except FirstTokenError as error:
        return json.dumps({"error": str(error)})
