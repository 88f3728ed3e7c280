"""Schedulers that cut prompts: what each may and must put into a step, by toy cases and by random schedules."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.request import LayerRecompute, Phase, Request
from firsttoken.engine.schedulers import REPORTED, SCHEDULERS, scheduler_named
from firsttoken.engine.schedulers.sarathi import Sarathi, StepTimeModel
from firsttoken.study.errors import ProfileError

CUTTING = sorted(name for name, kind in SCHEDULERS.items() if issubclass(kind, Sarathi))
WORKLOADS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.floats(0, 30)), min_size=1, max_size=12)


def batches(run) -> list[tuple]:
    """Every step as (its (cached, new) prefills, how many decode)."""
    return [(step.prefills, len(step.contexts)) for step in run.trace.steps]


def test_a_prompt_of_1000_is_five_chunks_of_200(lab) -> None:
    """The report's first toy case."""
    run = lab.simulated(300, scheduler="sarathi", token_budget=200, requests=8).offer((1000, 1, 0.0))
    run.finish()
    assert batches(run) == [(((start, 200),), 0) for start in range(0, 1000, 200)]


def test_three_decodes_and_a_chunk_of_what_is_left(lab) -> None:
    """The report's second: three requests decode when a prompt arrives; each goes on in every step."""
    run = lab.simulated(300, scheduler="sarathi", token_budget=16, requests=8)
    run.offer((4, 9, 0.0), (4, 9, 0.0), (4, 9, 0.0), (30, 1, 1.1))
    run.finish()
    assert batches(run)[:5] == [
        (((0, 4), (0, 4), (0, 4)), 0),
        (((0, 13),), 3),
        (((13, 13),), 3),
        (((26, 4),), 3),
        ((), 3),
    ]


def test_the_halves_of_it_alone(lab) -> None:
    asked = (4, 4, 0.0), (30, 2, 1.02)
    run = lab.simulated(300, scheduler="hybrid_only").offer(*asked)
    run.finish()
    assert batches(run) == [(((0, 4),), 0), (((0, 30),), 1), ((), 2), ((), 1)]
    run = lab.simulated(300, scheduler="chunked_only", token_budget=16).offer(*asked)
    run.finish()
    assert batches(run) == [(((0, 4),), 0), ((), 1), (((0, 16),), 0), ((), 1), (((16, 14),), 0), ((), 2)]


def test_a_cap_while_prompts_compete_with_decodes(lab) -> None:
    run = lab.simulated(300, scheduler="prefill_cap", token_budget=8, prefill_tokens=32, requests=8)
    run.offer((4, 9, 0.0), (30, 1, 1.02), (30, 1, 1.02))
    run.finish()
    assert batches(run)[:3] == [(((0, 4),), 0), (((0, 7),), 1), (((7, 7),), 1)]
    last = [batch for batch in batches(run) if batch[0]][-1]
    assert last[0][-1][1] > 7, "one prompt alone has the large budget"


def test_short_prompts_first_and_nobody_waits_for_ever(lab) -> None:
    asked = (40, 1, 0.0), (60, 1, 0.1), *((8, 1, 0.2 + 0.8 * i) for i in range(30))
    options = {"scheduler": "shortest_first", "token_budget": 8, "requests": 2}
    bounded = lab.simulated(300, **options, wait_s=12.0).offer(*asked)
    bounded.finish()
    patient = lab.simulated(300, **options).offer(*asked)
    patient.finish()
    assert patient.requests[1].begun_s > max(request.begun_s for request in patient.requests[2:])
    late = [r for r in bounded.requests[2:] if r.arrival_s > 0.1 and r.begun_s > bounded.requests[1].begun_s]
    assert late and bounded.requests[1].begun_s < 12.0 + 20 * 1.2


def test_the_adaptive_budget_learns_what_a_step_takes(lab) -> None:
    """A step of n prompt tokens and one decode takes 1.1 + n / 100 s here: 1.5 s are 40 tokens."""
    run = lab.simulated(4000, scheduler="adaptive_budget", token_budget=16, prefill_tokens=4096, requests=4, tbt_s=1.5)
    run.offer((4, 400, 0.0), (3000, 2, 30.0), (3000, 2, 60.0))
    run.finish()
    taken = [step.seconds for step in run.trace.steps if step.contexts and step.prefills]
    late = [sum(new for _, new in step.prefills) for step in run.trace.steps if step.contexts and step.prefills][-5:-1]
    assert max(taken) <= 1.5 + 1e-9 and all(38 <= tokens <= 40 for tokens in late)


def test_a_step_longer_than_foretold_counts_at_once() -> None:
    """Ten prompt tokens a second, foretold exactly: half as many fit as soon as one step took twice as long."""
    step_times = StepTimeModel()
    for tokens in (10, 20, 30, 40):
        step_times.observe([(0, tokens)], [], tokens / 10)
    assert step_times.most_tokens([], 0, 4.0, 1000) == 40
    step_times.observe([(0, 40)], [], 8.0)
    assert step_times.most_tokens([], 0, 4.0, 1000) == 20


def test_deadlines_let_a_step_take_the_slack(lab) -> None:
    run = lab.simulated(4000, scheduler="deadline", token_budget=16, prefill_tokens=4096, requests=4, tbt_s=2, ttft_s=5)
    run.offer((4, 100, 0.0), (600, 2, 30.0))
    run.finish()
    first = run.requests[0]
    chunks = [sum(new for _, new in step.prefills) for step in run.trace.steps if step.contexts and step.prefills]
    assert max(chunks) > 100, "thirty tokens that came a second early each are half a minute of slack"
    assert all(at <= first.arrival_s + 5 + 2 * i + 1e-6 for i, at in enumerate(first.times_s))


def test_who_is_behind_does_not_hold_up_the_prompts(lab) -> None:
    """A prompt of 31 s makes the second half a minute late; two seconds beside it are still 90 tokens of the third."""
    run = lab.simulated(4000, scheduler="deadline", token_budget=16, prefill_tokens=4096, requests=4, tbt_s=2, ttft_s=1)
    run.offer((3000, 1, 0.0), (4, 60, 0.1), (400, 1, 33.0))
    run.finish()
    late = run.requests[1]
    assert late.times_s[0] > 30
    assert run.requests[2].ttft_s < 20, "a block at a time, because somebody is late who will be late anyway"
    assert max(after - before for before, after in pairwise(late.times_s)) <= 2 + 1e-9


def test_who_gave_way_comes_back_before_shorter_prompts_begin(lab) -> None:
    run = lab.simulated(8, scheduler="shortest_first", token_budget=16, requests=8, preemption="recompute")
    run.offer((8, 16, 0.0), (8, 16, 0.1), *((4, 3, 0.5 * i) for i in range(10, 80)))
    run.until(lambda: run.requests[1].preemptions == 1)
    away_s, had = run.engine.executor.now(), len(run.requests[1].times_s)
    run.finish()
    back_s = run.requests[1].times_s[had]
    assert had and not [request for request in run.requests[2:] if away_s <= request.begun_s < back_s]


@settings(max_examples=150, deadline=None)
@given(
    asked=WORKLOADS,
    scheduler=st.sampled_from(CUTTING),
    policy=st.sampled_from(["swap", "recompute"]),
    budget=st.integers(4, 40),
    spare=st.integers(0, 12),
    tbt_s=st.sampled_from([1.2, 2.0, math.inf]),
)
def test_rules_of_stall_free_batches(lab, asked, scheduler: str, policy: str, budget: int, spare: int, tbt_s) -> None:
    """Every ready decode is in every batch, the budget holds, and a chunk finds its blocks taken."""
    run = lab.simulated(
        lab.smallest_pool([one[:2] for one in asked], 4) + spare,
        host_blocks=1000,
        scheduler=scheduler,
        preemption=policy,
        token_budget=budget,
        prefill_tokens=budget,
        requests=4,
        tbt_s=tbt_s,
        ttft_s=3.0,
        wait_s=10.0,
    )
    run.offer(*asked)
    engine = run.engine
    execute = engine.executor.execute

    def watched(chunks):
        batch = {chunk.request.number for chunk in chunks}
        running = [request for request in engine.scheduler.running if request.phase is Phase.RUNNING]
        assert {request.number for request in running if request.decoding} <= batch, "a decode was left out"
        bound = budget if scheduler not in ("adaptive_budget", "deadline") else budget + 4 + 4  # a block goes on always
        assert sum(chunk.tokens for chunk in chunks) <= bound
        assert len(batch) == len(chunks), "a request is twice in a batch"
        for chunk in chunks:
            assert chunk.end <= 4 * len(chunk.request.blocks), "keys without a block"
        return execute(chunks)

    engine.executor.execute = watched
    run.finish()
    for request in run.requests:
        assert len(request.times_s) == request.sampling.max_tokens
        assert all(earlier < later for earlier, later in pairwise(request.times_s))


@settings(max_examples=60, deadline=None)
@given(asked=WORKLOADS, wait_s=st.floats(0.5, 20), budget=st.integers(2, 20))
def test_from_the_bound_on_nobody_younger_begins_before(lab, asked, wait_s: float, budget: int) -> None:
    run = lab.simulated(400, scheduler="shortest_first", token_budget=budget, requests=2, wait_s=wait_s)
    run.offer(*asked)
    run.finish()
    for old in run.requests:
        for young in run.requests:
            if old.order < young.order and old.begun_s > young.begun_s:
                assert young.begun_s - old.arrival_s < wait_s


def test_the_reports_names_name_them() -> None:
    assert {name: kind.name for name, kind in REPORTED.items()} == {
        "faster_transformer": "request_level",
        "orca": "iteration_level",
        "vllm": "prefill_first",
        "simple_chunking": "chunked_only",
    }
    assert scheduler_named("sarathi") is Sarathi
    with pytest.raises(ProfileError, match=r"no scheduler 'sarathy'; .*sarathi"):
        EngineConfig(scheduler="sarathy")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_budget": 0}, "token_budget must be at least 1, not 0"),
        ({"token_budget": 100, "requests": 128}, "budget of 100 cannot hold a token of each of 128 requests; raise"),
        ({"tbt_s": 0.0}, "tbt_s must be above 0"),
        ({"wait_s": math.nan}, "wait_s must be above 0"),
    ],
)
def test_budgets_that_cannot_be(wrong: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        EngineConfig(scheduler="sarathi", **wrong)


class Grown(NamedTuple):
    """A model of ``depth`` layers that has grown ``key`` times."""

    key: int
    depth: int = 10
    arrived: int = 10

    def redo(self, request: Request, layers: range) -> LayerRecompute:
        return LayerRecompute(layers, request.cached)

    def adopt(self, request: Request) -> None:
        """Nothing is kept beside keys and values."""


@pytest.mark.parametrize(("layers", "steps"), [(range(10), 3), (range(2, 7), 2), (range(4, 6), 1)])
def test_a_token_that_goes_through_some_layers_counts_as_their_share(lab, layers: range, steps: int) -> None:
    """Three requests of 16 tokens and more redo them within a budget of 20 tokens a step."""
    run = lab.simulated(300, scheduler="sarathi", token_budget=20, requests=3)
    run.engine.executor.version = Grown(1)
    run.offer(*[(16, 9, 0.0)] * 3)
    for request in run.requests:
        request.moves = True
    run.until(lambda: all(request.output for request in run.requests))
    done = len(run.trace.steps)
    run.engine.publish(Grown(2), lambda old, new: layers)
    run.finish()
    redone = [step for step in run.trace.steps[done:] if step.prefills]
    assert len(redone) == steps, [step.prefills for step in redone]
    work = [len(layers) / 10 * sum(new for _, new in step.prefills) + len(step.contexts) for step in redone]
    assert max(work) <= 20
