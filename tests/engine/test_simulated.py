"""The engine on a cost model: time adds up, nothing is lost, and it decides as the live engine does."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import Listening

from firsttoken.cps.policies import make_policy
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.preemption.resume import RESUME_ORDERS
from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.engine.request import Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.simulation.costs.published import PublishedCosts

WORKLOADS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.just(0.0) | st.floats(0, 40)), min_size=1, max_size=15
)
POLICIES = (
    st.sampled_from(["swap", "recompute", "online"]).map(make_policy)
    | st.floats(0, 80).map(lambda threshold: make_policy("cross_point", threshold=threshold))
    | st.builds(lambda: Listening(lambda tokens: Action.BOTH_ENDS))
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), asked=WORKLOADS, policy=POLICIES, overlap=st.booleans(), published=st.booleans())
def test_everybody_gets_all_tokens_and_every_block_comes_back(lab, data, asked, policy, overlap, published) -> None:
    block_tokens, watermark = data.draw(st.integers(1, 16)), data.draw(st.sampled_from([0.0, 0.01, 0.3]))
    run = lab.simulated(
        lab.smallest_pool([one[:2] for one in asked], block_tokens, watermark) + data.draw(st.integers(0, 20)),
        costs=PublishedCosts(decode_s=0.01) if published else None,
        policy=policy,
        block_tokens=block_tokens,
        host_blocks=data.draw(st.sampled_from([0, 5, 1000])),
        overlap=overlap,
        watermark=watermark,
        scheduler=data.draw(st.sampled_from(sorted(SCHEDULERS))),
        victim=data.draw(st.sampled_from(sorted(VICTIMS))),
        requests=data.draw(st.sampled_from([1, 3, 256])),
        prefill_tokens=data.draw(st.integers(1, 200)),
        resume=data.draw(st.sampled_from(sorted(RESUME_ORDERS))),
        wait_s=data.draw(st.sampled_from([0.5, 20.0])),
        write_through=data.draw(st.booleans()),
    )
    run.offer(*asked)
    clock = 0.0
    while run.engine.busy:
        before = sum(len(request.times_s) for request in run.requests)
        produced = len(run.step())
        assert produced == sum(len(request.times_s) for request in run.requests) - before
        assert produced > 0 or isinstance(policy, Listening), "only a step that computes first tokens again says none"
        assert run.engine.executor.now() >= clock
        clock = run.engine.executor.now()
    run.all_back()
    for request, (prompt, new, at_s) in zip(run.requests, asked, strict=True):
        assert (len(request.output), len(request.tokens)) == (new, prompt + new)
        assert request.times_s == sorted(request.times_s) and request.ttft_s > 0
        assert request.arrival_s == at_s
        assert request.tpot_s is None if new == 1 else request.tpot_s > 0
    assert len(run.trace.recoveries) == sum(request.preemptions for request in run.requests)
    heads = sum(one.action is Action.BOTH_ENDS and one.recompute_s > 0 for one in run.trace.recoveries)
    chunks = sum(len(step.prefills) + len(step.contexts) for step in run.trace.steps)
    assert chunks == sum(new for _, new, _ in asked) + heads
    gaps = zip(run.trace.steps, run.trace.steps[1:], strict=False)
    assert all(one.at_s + one.seconds <= after.at_s for one, after in gaps)


def test_time_adds_up(lab) -> None:
    """Toy: 1 s a step, 0.01 a prefill token, 0.1 a decode."""
    run = lab.simulated(50)
    early, late = run.submit([0] * 10, Sampling(3), 0.0), run.submit([0] * 20, Sampling(2), 100.0)
    run.finish()
    assert early.times_s == pytest.approx([1.1, 2.2, 3.3])
    assert late.times_s == pytest.approx([101.2, 102.3])  # the clock jumps over the idle time
    assert (early.ttft_s, early.tpot_s) == pytest.approx((1.1, 1.1))
    assert [step.at_s for step in run.trace.steps] == pytest.approx([0, 1.1, 2.2, 100, 101.2])


def squeeze(lab, **options):
    """Two requests fill the pool with their prompts, until 1.16 s: then the second has to go."""
    run = lab.simulated(4, **options)
    for _ in range(2):
        run.submit([0] * 8, Sampling(8), 0.0)
    run.finish()
    (recovery,) = run.trace.recoveries
    assert (recovery.request, recovery.preempted_at_s) == (1, pytest.approx(1.16))
    return run, recovery


def test_a_swap_costs_its_two_ways(lab) -> None:
    run, recovery = squeeze(lab, host_blocks=10, preemption="swap")
    assert (recovery.action, recovery.reason, recovery.tokens) == (Action.SWAP, "policy", 8)
    assert (recovery.out_s, recovery.in_s, recovery.prep_s, recovery.recompute_s) == pytest.approx((0.16, 0.24, 0, 0))
    assert recovery.cost_s == pytest.approx(0.4)
    alone, last = run.requests
    assert alone.times_s == pytest.approx([1.16] + [1.16 + 0.16 + 1.1 * n for n in range(1, 8)])
    assert last.times_s[1] == pytest.approx(alone.times_s[-1] + 0.24 + 1.1)


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_the_way_back_takes_no_time_from_the_steps(lab, overlap: bool) -> None:
    """The first of three ends; while the third comes back, the second goes on."""
    run = lab.simulated(7, host_blocks=20, preemption="swap", overlap=overlap)
    for new in (4, 12, 4):
        run.submit([0] * 8, Sampling(new), 0.0)
    run.finish()
    (recovery,) = run.trace.recoveries
    assert recovery.request == 2 and recovery.in_s == pytest.approx(0.24)
    between_steps = run.engine.executor.now() - sum(step.seconds for step in run.trace.steps)
    assert between_steps == pytest.approx(recovery.out_s + (0 if overlap else recovery.in_s))


def test_a_recomputation_costs_its_share_of_the_step(lab) -> None:
    _, recovery = squeeze(lab, preemption="recompute")
    assert (recovery.action, recovery.reason, recovery.tokens) == (Action.RECOMPUTE, "policy", 9)
    assert recovery.cost_s == recovery.recompute_s == pytest.approx(1.09)


def test_costs_may_change_while_it_runs(lab) -> None:
    from_two = {True: PublishedCosts(decode_s=1.0), False: PublishedCosts(decode_s=0.25)}
    run = lab.simulated(50, costs=lambda now_s: from_two[now_s < 2])
    request = run.submit([0], Sampling(6), 1.0)
    run.finish()
    gaps = [b - a for a, b in zip(request.times_s, request.times_s[1:], strict=False)]
    assert gaps == pytest.approx([1.0, 0.25, 0.25, 0.25, 0.25])


@settings(max_examples=60, deadline=None)
@given(asked=WORKLOADS, scheduler=st.sampled_from(sorted(SCHEDULERS)))
def test_a_policy_learns_every_recovery_and_every_prompt_once(lab, asked, scheduler: str) -> None:
    policy = Listening(lambda tokens: Action.RECOMPUTE if tokens % 2 else Action.SWAP)
    run = lab.simulated(
        lab.smallest_pool([one[:2] for one in asked], 4), policy=policy, host_blocks=1000, scheduler=scheduler
    )
    run.offer(*asked)
    run.finish()
    for action in Action:
        seen = sorted((one.tokens, one.seconds) for one in policy.seen if one.action is action)
        paid = [(one.tokens, one.cost_s) for one in run.trace.recoveries if one.action is action]
        if action is Action.RECOMPUTE:
            whole = [new for step in run.trace.steps for _, new in step.prefills]
            assert sorted(tokens for tokens, _ in seen) == sorted(whole)
            assert set(paid) <= set(seen) and len(seen) == len(asked) + len(paid)
            prefilling = [step for step in run.trace.steps if step.prefills and not step.contexts]
            if len(prefilling) == sum(1 for step in run.trace.steps if step.prefills):
                assert math.isclose(sum(seconds for _, seconds in seen), sum(step.seconds for step in prefilling))
        else:
            assert seen == sorted(paid)
            assert all(seconds == pytest.approx(0.05 * tokens) for tokens, seconds in seen)
    assert [one.now_s for one in policy.seen] == sorted(one.now_s for one in policy.seen)


def decisions(run) -> tuple[list, list]:
    steps = [(step.prefills, step.contexts) for step in run.trace.steps]
    return steps, [(one.request, one.action, one.reason, one.tokens) for one in run.trace.recoveries]


def test_live_and_simulated_decide_alike(lab, llama) -> None:
    """When all come at once time plays no role, and one engine runs both."""
    preempted = 0

    @settings(settings.get_profile("live"), max_examples=50)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal preempted
        rng = random.Random(seed)
        picked = rng.choices(llama.known, k=rng.randint(3, 7))
        sizes = [rng.randint(4, 24) for _ in picked]
        lengths = [(len(one.prompt), new) for one, new in zip(picked, sizes, strict=True)]
        block_tokens, watermark = rng.randint(1, 8), rng.choice((0.0, 0.1))
        blocks = lab.smallest_pool(lengths, block_tokens, watermark) + rng.randint(0, 3)
        name, threshold = rng.choice(("swap", "recompute", "cross_point")), rng.uniform(0, 50)
        options = {
            "block_tokens": block_tokens,
            "host_blocks": rng.choice((0, 1000)),
            "watermark": watermark,
            "scheduler": rng.choice((*SCHEDULERS, "prefill_first", "prefill_first")),
            "victim": rng.choice(sorted(VICTIMS)),
            "requests": rng.choice((2, 256)),
            "prefill_tokens": rng.randint(8, 200),
        }
        runs = []
        for make in (lambda **own: lab.live(llama.model, blocks, **own), lambda **own: lab.simulated(blocks, **own)):
            policy = make_policy(name, **({"threshold": threshold} if name == "cross_point" else {}))
            run = make(policy=policy, **options)
            for one, new in zip(picked, sizes, strict=True):
                run.submit(one.prompt, Sampling(new), 0.0)
            run.finish()
            runs.append(run)
        live, simulated = map(decisions, runs)
        assert live == simulated
        preempted += len(live[1])

    check()
    assert preempted > 8
