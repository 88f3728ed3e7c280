"""Batches that follow each other through stages: when they leave, what is idle, and that nobody loses a token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload_items import Item
from firsttoken.sarathi.pipeline import PipelineStages, StagedExecutor, serve_staged
from firsttoken.simulation.costs.sarathi_artifact import BatchCosts
from firsttoken.study.errors import RequestError
from firsttoken_studies.nb41_serving_capacity.pipeline_bubbles import equal_time

COSTS = BatchCosts()


def items(*asked: tuple[int, int]) -> list[Item]:
    return [Item(0.0, prompt, answer, (0,) * prompt) for prompt, answer in asked]


def test_a_short_batch_waits_for_a_long_one() -> None:
    """Two stages: 4 s, then 2 s that are ready at once, then 4 s that are ready when the first is back."""
    stages = PipelineStages(2)
    assert stages.send(0.0, 4.0) == 4.0
    assert stages.send(0.0, 2.0) == 5.0, "1 s in the first stage from 2 s on, and in the second from 4 s on"
    assert stages.send(4.0, 4.0) == 8.0
    assert stages.busy_s == 10.0 and stages.bubbles == pytest.approx(1 - 10 / 16)


def test_one_stage_and_one_batch_is_the_engine_alone() -> None:
    stages, trace = PipelineStages(1), Trace()
    engine = Engine(StagedExecutor(COSTS, 200, stages), EngineConfig(scheduler="sarathi", requests=4), trace=trace)
    serve_staged([engine], items((900, 4), (30, 6)))
    assert stages.bubbles == pytest.approx(0.0) and stages.busy_s == pytest.approx(sum(s.seconds for s in trace.steps))


def test_who_comes_later_is_refused() -> None:
    with pytest.raises(RequestError, match="that all arrive at once"):
        serve_staged([], [Item(1.0, 1, 1, (0,))])


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=12),
    count=st.integers(1, 3),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
)
def test_everybody_gets_all_tokens_and_stages_are_never_twice_busy(asked: list, count: int, scheduler: str) -> None:
    stages = PipelineStages(count)
    settings = EngineConfig(scheduler=scheduler, requests=4, token_budget=64, tbt_s=0.5, ttft_s=2.0)
    engines = [Engine(StagedExecutor(COSTS, 60, stages), settings) for _ in range(count)]
    requests = serve_staged(engines, items(*asked))
    assert [len(request.times_s) for request in requests] == [answer for _, answer in asked]
    assert -1e-9 <= stages.bubbles < 1


def test_chunks_of_equal_time_get_shorter() -> None:
    """A prompt of 6,000 tokens in steps of what its first 1,024 take."""
    target, trace = COSTS.step_s([(0, 1024)], []), Trace()
    config = EngineConfig(scheduler=equal_time(COSTS, target), requests=4, prefill_tokens=4096)
    engine = Engine(StagedExecutor(COSTS, 500, PipelineStages(1)), config, trace=trace)
    serve_staged([engine], items((6000, 1)))
    chunks = [step.prefills[0][1] for step in trace.steps]
    assert chunks[0] == 1024 and sum(chunks) == 6000 and min(chunks[:-1]) < 900
    assert all(step.seconds == pytest.approx(target, rel=0.01) for step in trace.steps[:-1])
