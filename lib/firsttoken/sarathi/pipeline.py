"""A model cut into stages on as many devices: batches follow each other through them, and leave bubbles."""

from __future__ import annotations

from collections.abc import Sequence

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item
from firsttoken.study.errors import RequestError


class PipelineStages:
    """``count`` devices, each with an equal share of the layers and one batch at a time, in the order they are sent.

    Handing hidden states on costs nothing. ``busy_s`` is the time that devices computed, all together.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.busy_s = 0.0
        self._free_s = [0.0] * count

    def send(self, at_s: float, seconds: float) -> float:
        """Send a batch of ``seconds`` on each device at ``at_s``; return when it leaves the last stage."""
        for stage in range(self.count):
            at_s = max(at_s, self._free_s[stage]) + seconds / self.count
            self._free_s[stage] = at_s
        self.busy_s += seconds
        return at_s

    @property
    def bubbles(self) -> float:
        """The share of the devices' time so far in which they had nothing to compute."""
        return 1 - self.busy_s / (self.count * self._free_s[-1]) if self.busy_s else 0.0


class StagedExecutor(SimulatedExecutor):
    """Runs one batch at a time in the stages of a pipeline: its tokens come when it leaves the last one."""

    def __init__(self, costs: Costs, blocks: int, stages: PipelineStages) -> None:
        super().__init__(costs, blocks)
        self._stages = stages

    def charge(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        self._now = self._stages.send(self._now, self.costs_at(self._now).step_s(prefills, contexts))
        return self._now


def serve_staged(engines: Sequence[Engine], items: Sequence[Item]) -> list[Request]:
    """Deal ``items`` out to ``engines`` in turn and step whichever is ready first, until all are done.

    Raises RequestError unless all arrive at 0: an engine that waits would hold the stages for the others.
    """
    if any(item.arrival_s for item in items):
        raise RequestError("a pipeline is simulated for requests that all arrive at once; set arrival_s to 0")
    requests = [
        engines[number % len(engines)].submit(item.prompt, Sampling(item.output_tokens), 0.0)
        for number, item in enumerate(items)
    ]
    while busy := [engine for engine in engines if engine.busy]:
        min(busy, key=lambda engine: engine.executor.now()).step()
    return requests
