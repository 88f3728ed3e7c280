"""Who runs in which step, on a clock that anyone can add up (``Toy``) and in blocks of four tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import Listening

from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.engine.request import Phase
from firsttoken.engine.schedulers import SCHEDULERS

Asked = tuple[int, int, float]  # prompt tokens, new tokens, arrival in s

WORKLOADS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.just(0.0) | st.floats(0, 30)), min_size=1, max_size=12
)


def steps(run) -> list[tuple]:
    """Every step as (tokens of its prefills, contexts of its decodes)."""
    assert all(cached == 0 for step in run.trace.steps for cached, _ in step.prefills)
    return [(tuple(new for _, new in step.prefills), step.contexts) for step in run.trace.steps]


THREE = (4, 4, 0.0), (6, 2, 0.0), (5, 2, 0.5)


def test_request_level_closes_its_batch(lab) -> None:
    run = lab.simulated(20, scheduler="request_level").offer(*THREE)
    run.finish()
    batch = [((4, 6), ()), ((), (4, 6)), ((), (5,)), ((), (6,))]
    assert steps(run) == [*batch, ((5,), ()), ((), (5,))]


def test_iteration_level_mixes(lab) -> None:
    run = lab.simulated(20, scheduler="iteration_level").offer(*THREE)
    run.finish()
    assert steps(run) == [((4, 6), ()), ((5,), (4, 6)), ((), (5, 5)), ((), (6,))]


def test_prefill_first_lets_decodes_wait_and_never_mixes(lab) -> None:
    run = lab.simulated(20, scheduler="prefill_first").offer(*THREE)
    run.finish()
    assert steps(run) == [((4, 6), ()), ((5,), ()), ((), (4, 6, 5)), ((), (5,)), ((), (6,))]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ((6, 4, 3), [(6, 4), (3,)]),
        ((25, 3), [(25,), (3,)]),  # the first may exceed the budget, and goes alone
        ((6, 25, 3), [(6,), (25,), (3,)]),  # nobody overtakes
        ((1,) * 12, [(1,) * 10, (1, 1)]),
    ],
)
@pytest.mark.parametrize("scheduler", ["prefill_first", "iteration_level", "request_level"])
def test_the_prefill_budget(lab, scheduler: str, prompts: tuple[int, ...], expected: list) -> None:
    run = lab.simulated(50, scheduler=scheduler, prefill_tokens=10).offer(*((n, 5, 0.0) for n in prompts))
    run.finish()
    assert [new for new, _ in steps(run) if new] == expected


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_so_many_requests_at_once(lab, scheduler: str) -> None:
    run = lab.simulated(50, scheduler=scheduler, requests=2).offer(*[(4, 3, 0.0)] * 5)
    run.finish()
    assert steps(run)[0] == ((4, 4), ())
    assert max(len(new) + len(contexts) for new, contexts in steps(run)) == 2


@pytest.mark.parametrize("scheduler", ["request_level", "iteration_level"])
def test_blocks_are_reserved_for_the_whole_answer(lab, scheduler: str) -> None:
    """Both prompts would fit into 6 blocks, but with their answers they need 4 + 3; the third needs 2 and must wait."""
    run = lab.simulated(6, scheduler=scheduler).offer((8, 9, 0.0), (4, 9, 0.0), (4, 5, 0.0))
    run.finish()
    prefills = [step for step in steps(run) if step[0]]
    first, second, third = (request.times_s for request in run.requests)
    assert prefills[0] == ((8,), ())
    assert second[0] > first[-1] and third[0] >= second[0]
    assert not run.trace.recoveries
    run = lab.simulated(6, scheduler="prefill_first").offer((8, 9, 0.0), (4, 9, 0.0), (4, 5, 0.0))
    run.step()
    assert steps(run) == [((8, 4, 4), ())]


@settings(max_examples=60, deadline=None)
@given(asked=WORKLOADS, scheduler=st.sampled_from(["request_level", "iteration_level"]), spare=st.integers(0, 20))
def test_who_has_reserved_is_never_preempted(lab, asked: list[Asked], scheduler: str, spare: int) -> None:
    blocks = lab.smallest_pool([one[:2] for one in asked], 4) + spare
    run = lab.simulated(blocks, scheduler=scheduler, host_blocks=100, preemption="swap").offer(*asked)
    run.finish()
    assert not run.trace.recoveries and not any(request.preemptions for request in run.requests)
    if scheduler == "request_level":
        assert not any(new and contexts for new, contexts in steps(run))


@settings(max_examples=150, deadline=None)
@given(
    asked=WORKLOADS,
    policy=st.sampled_from(["swap", "recompute"]),
    victim=st.sampled_from(sorted(VICTIMS)),
    spare=st.integers(0, 12),
    share=st.sampled_from([0.0, 0.2]),
    budget=st.integers(1, 60),
    resume=st.sampled_from(["in_order", "any_that_fits", "shortest_first"]),
)
def test_rules_of_prefill_first(
    lab, asked: list[Asked], policy: str, victim: str, spare: int, share: float, budget: int, resume: str
) -> None:
    """No mixing, the budget, the watermark, nobody new before the swapped, first come first admitted."""
    run = lab.simulated(
        lab.smallest_pool([one[:2] for one in asked], 4, share) + spare,
        host_blocks=1000,
        preemption=policy,
        victim=victim,
        watermark=share,
        prefill_tokens=budget,
        resume=resume,
    )
    run.offer(*asked)
    scheduler, pool = run.engine.scheduler, run.engine.pool
    seen: list[int] = []
    while run.engine.busy:
        swapped = list(scheduler.swapped)
        now = len(run.trace.steps)
        produced = run.step()
        (step,) = run.trace.steps[now:]
        assert not (step.prefills and step.contexts)
        new = [tokens for _, tokens in step.prefills]
        assert len(new) == 1 or sum(new) <= budget
        if new:
            assert not swapped, "a prompt went before the swapped"
            ended = sum(-(-request.cached // 4) for request, _ in produced if request.finished)
            assert pool.free - ended >= pool.watermark, "admission took what was held back"
        seen += [request.number for request, _ in produced if len(request.times_s) == 1]
    run.all_back()
    by_arrival = sorted(range(len(asked)), key=lambda number: (asked[number][2], number))
    assert seen == by_arrival


@pytest.mark.parametrize(
    ("victim", "tokens"), [("last_arrived", 7), ("first_arrived", 8), ("longest", 12), ("shortest", 4)]
)
@pytest.mark.parametrize("action", Action)
def test_the_victim(lab, action: Action, victim: str, tokens: int) -> None:
    """Four prompts fill the pool, so the first decode has to take somebody's blocks."""
    policy = Listening(lambda tokens: action)
    run = lab.simulated(8, host_blocks=50, policy=policy, victim=victim)
    run.offer(*((prompt, 6, 0.0) for prompt in (8, 4, 12, 7)))
    run.step()
    assert run.engine.pool.free == 0 and steps(run) == [((8, 4, 12, 7), ())]
    run.step()
    assert policy.asked[0] == tokens
    run.finish()


def goings(run) -> tuple[list[int], list[int]]:
    """Run to the end; who was swapped out, and who came back, in order."""
    gone: list[int] = []
    back: list[int] = []
    away: set[int] = set()
    while run.engine.busy:
        run.step()
        now = {request.number for request in run.requests if request.phase is Phase.SWAPPED}
        gone += sorted(now - away, reverse=True)
        back += sorted(away - now)
        away = now
    return gone, back


@pytest.mark.parametrize(
    ("resume", "wait_s", "expected"),
    [
        ("in_order", math.inf, [1, 2]),
        ("any_that_fits", math.inf, [2, 1]),
        ("shortest_first", math.inf, [2, 1]),
        ("aged", 1e6, [2, 1]),
        ("aged", 1e-6, [1, 2]),
    ],
)
def test_the_swapped_pass_each_other_where_they_may(lab, resume: str, wait_s: float, expected: list[int]) -> None:
    """The second left three blocks and needs four; the third needs two."""
    run = lab.simulated(5, host_blocks=50, preemption="swap", resume=resume, wait_s=wait_s)
    gone, back = goings(run.offer((4, 12, 0.0), (12, 5, 0.0), (4, 3, 0.0)))
    assert gone[:2] == [2, 1] and back[:2] == expected


def test_the_recomputed_go_before_those_who_never_ran(lab) -> None:
    """One block is free while the second waits for three; the third, which needs one, does not overtake it."""
    run = lab.simulated(4, preemption="recompute").offer((8, 9, 0.0), (8, 9, 0.0), (4, 5, 0.0))
    run.finish()
    assert [new for new, _ in steps(run) if new][:2] == [(8, 8), (9, 4)]
    assert run.requests[1].preemptions == 1 and run.requests[2].times_s[0] > run.requests[0].times_s[-1]


THREE_LONG = (10, 16, 0.0), (6, 16, 0.0), (8, 16, 0.0)


def test_a_step_that_had_to_preempt_restores_nobody(lab) -> None:
    """Else the blocks that one had to give up would go to another who waits; here there is such a step."""
    run = lab.simulated(8, host_blocks=50, preemption="swap", victim="longest").offer(*THREE_LONG)
    while run.engine.busy:
        preempted = sum(request.preemptions for request in run.requests)
        away = set(run.engine.scheduler.swapped)
        run.step()
        if sum(request.preemptions for request in run.requests) > preempted:
            assert away <= set(run.engine.scheduler.swapped)
    assert run.trace.recoveries
