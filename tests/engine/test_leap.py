"""A run that takes steps at once comes to what one step after the other comes to."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.request import Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.simulation.costs.published import PublishedCosts

WORKLOADS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.just(0.0) | st.floats(0, 90)), min_size=1, max_size=8
)


def outcome(run) -> tuple:
    """All that a run leaves behind."""
    return (
        [(one.times_s, one.tokens, one.cached, one.computed, one.preemptions, one.begun_s) for one in run.requests],
        [(step.at_s, step.seconds, step.prefills, step.contexts, step.token_spans) for step in run.trace.steps],
        run.trace.recoveries,
        run.engine.token_counts,
        run.engine.executor.now(),
    )


@settings(max_examples=150, deadline=None)
@given(
    asked=WORKLOADS,
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    policy=st.sampled_from(["swap", "recompute"]),
    spare=st.integers(0, 60),
    overlap=st.booleans(),
    shared=st.booleans(),
    drifting=st.booleans(),
)
def test_the_outcome_is_the_same(lab, asked, scheduler: str, policy: str, spare, overlap, shared, drifting) -> None:
    def made():
        costs = {True: PublishedCosts(decode_s=0.9), False: PublishedCosts(decode_s=0.3)}
        run = lab.simulated(
            lab.smallest_pool([one[:2] for one in asked], 4) + spare,
            costs=(lambda now_s: costs[now_s < 15]) if drifting else None,
            host_blocks=30,
            overlap=overlap,
            preemption=policy,
            scheduler=scheduler,
            share_prefixes=shared,
            token_budget=16,
            requests=5,
            tbt_s=1.5,
            ttft_s=3.0,
            wait_s=9.0,
        )
        return run.offer(*asked)

    stepped, whole = made(), made()
    stepped.finish()
    whole.engine.run()
    whole.audit()
    whole.all_back()
    assert outcome(whole) == outcome(stepped)


@settings(max_examples=60, deadline=None)
@given(asked=WORKLOADS, scheduler=st.sampled_from(sorted(SCHEDULERS)), spare=st.integers(0, 60), drifting=st.booleans())
def test_requests_end_alike_where_nobody_looks_at_single_steps(lab, asked, scheduler: str, spare, drifting) -> None:
    def served(looked_at: bool) -> list[tuple]:
        costs = {True: PublishedCosts(decode_s=0.9), False: PublishedCosts(decode_s=0.3)}
        run = lab.simulated(
            lab.smallest_pool([one[:2] for one in asked], 4) + spare,
            costs=(lambda now_s: costs[now_s < 15]) if drifting else costs[False],
            scheduler=scheduler,
            token_budget=16,
            requests=5,
        ).offer(*asked)
        if not looked_at:
            run.engine.trace = None
        run.engine.run()
        return [(one.times_s, one.tokens, one.cached, one.preemptions) for one in run.requests]

    assert served(looked_at=False) == served(looked_at=True)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("steady", [True, False])
def test_steps_are_taken_at_once_only_under_a_steady_scheduler(lab, steady: bool, shared: bool) -> None:
    class Mine(Sarathi):
        """Sarathi, which says of itself whether it is steady."""

    Mine.steady = steady
    run = lab.simulated(300, scheduler=Mine, token_budget=64, requests=8, share_prefixes=shared)
    for at_s in (0.0, 20.0):
        run.submit([0] * 20, Sampling(50), at_s)
    step, taken = run.engine.step, []
    run.engine.step = lambda: taken.append(step())
    run.engine.run()
    steps = len(run.trace.steps)
    assert steps > 60 and (len(taken) < 10 if steady else len(taken) == steps)


class Every(Sarathi):
    """Sees every step."""

    seen: ClassVar[list[float]] = []

    def completed(self, prefills, contexts, seconds: float) -> None:
        self.seen.append(seconds)


def test_a_scheduler_is_told_of_every_step(lab) -> None:
    run = lab.simulated(300, scheduler=Every, token_budget=64, requests=8)
    run.submit([0] * 20, Sampling(50), 0.0)
    run.engine.run()
    assert Every.seen == [step.seconds for step in run.trace.steps] and len(Every.seen) == 50
