"""Bubbles on a pipeline (Figure 13): whole prompts, chunks of equal size, chunks of equal time, simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload_items import Arrivals, Item, with_arrivals
from firsttoken.sarathi.pipeline import PipelineStages, StagedExecutor, serve_staged
from firsttoken.simulation.hardware import Hardware
from firsttoken.simulation.lengths import lengths, workload
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows, frame_of

# Chunks that take as long as each other, whatever stands behind them: later ones of a prompt are shorter.


def equal_time(costs: Costs, seconds: float) -> type[Sarathi]:
    """Sarathi with the budget that a step of ``seconds`` holds by ``costs``, and a block more than it decodes at least.

    A chunk attends to all before it, so that of equal chunks the last takes longest; on stages one batch then waits for
    another (Sarathi-Serve, 3.3). No step prefills more than ``prefill_tokens``.
    """

    class EqualTime(Sarathi):
        name: ClassVar[str] = "equal_time"

        def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
            contexts = [chunk.start for chunk in decodes]
            begun = next((request.cached for request in self.running if not request.decoding), 0)
            low, high = self.block_tokens, self.config.prefill_tokens
            while low < high:
                middle = (low + high + 1) // 2
                fits = costs.step_s([(begun, middle)], contexts) <= seconds
                low, high = (middle, high) if fits else (low, middle - 1)
            return len(decodes) + low

    return EqualTime


WHOLE, SIZE, TIME = "whole", "equal_size", "equal_time"


@dataclass(frozen=True)
class PipelineConfig:
    """``requests`` of ``lengths``, all at once, for each of ``seeds`` draws, on ``stages`` devices.

    As many batches are under way, of at most ``batch`` requests each. Chunks of equal size fill ``token_budget``; steps
    with chunks of equal time are as long as those take on average.
    """

    lengths: str
    requests: int
    seeds: int
    batch: int
    stages: int
    token_budget: int

    def __post_init__(self) -> None:
        if min(self.requests, self.seeds, self.batch, self.stages) < 1:
            raise ProfileError("pipeline: requests, seeds, batch and stages must be at least 1")


def pipeline_bubbles(profile: Profile) -> Outcome:
    """Rows {seed, chunks, bubbles, makespan_s, step_s, step_cv}: ``bubbles`` are a share of the devices' time,
    ``step_s`` and ``step_cv`` mean and variation of the steps that prefill."""
    config, hardware = profile.section("pipeline", PipelineConfig), profile.section("hardware", Hardware)
    costs, pairs = hardware.read(), lengths(config.lengths)
    pairs = pairs[config.stages * pairs.sum(1) <= hardware.tokens]
    rows: Rows = []
    for seed in track(range(profile.seed, profile.seed + config.seeds), desc="pipeline"):
        items = with_arrivals(workload(pairs, config.requests, seed, 1.0), Arrivals())  # all at once
        runs = {WHOLE: _ran(config, hardware, costs, items, "hybrid_only")}
        runs[SIZE] = _ran(config, hardware, costs, items, "sarathi")
        runs[TIME] = _ran(config, hardware, costs, items, equal_time(costs, runs[SIZE]["step_s"]))
        rows += [{"seed": seed, "chunks": chunks} | row for chunks, row in runs.items()]
    return Outcome(rows, provenance=hardware.provenance(costs))


def _ran(
    config: PipelineConfig, hardware: Hardware, costs: Costs, items: Sequence[Item], scheduler: str | type[Scheduler]
) -> dict[str, float]:
    stages, traces = PipelineStages(config.stages), [Trace() for _ in range(config.stages)]
    settings = EngineConfig(scheduler=scheduler, requests=config.batch, token_budget=config.token_budget)
    blocks = hardware.blocks // config.stages
    engines = [Engine(StagedExecutor(costs, blocks, stages), settings, trace=trace) for trace in traces]
    requests = serve_staged(engines, items)
    steps = [costs.step_s(s.prefills, s.contexts) for trace in traces for s in trace.steps if s.prefills]
    return {
        "bubbles": stages.bubbles,
        "makespan_s": max(request.times_s[-1] for request in requests),
        "step_s": float(np.mean(steps)),
        "step_cv": float(np.std(steps) / np.mean(steps)),
    }


def pipeline_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Bubbles and variation of the steps by kind of chunks; bubbles and makespan over those of equal size, by seed."""
    summary, equal = Summary(), frame_of(rows, chunks=SIZE)
    for kind in (WHOLE, SIZE, TIME):
        kind_rows = frame_of(rows, chunks=kind)
        alone = {"bubbles_pct": ("bubbles", "mean", "%", 100), "step_cv": ("step_cv", "mean", "")}
        summary.by(kind_rows, {"variant": "chunks"}, alone)
        for measure, column in (("bubbles_x", "bubbles"), ("makespan_x", "makespan_s")) if kind != SIZE else ():
            ratio = ratio_of_means(kind_rows[column], equal[column]).summary("x")
            summary.add(measure, ratio, variant=kind, than=SIZE)
    return summary
