"""The books: every token of a prompt is prefilled once, every generated one decoded once, however they were cut."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from chunked import Chunked
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import Listening

from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.engine.request import GREEDY, Kind, Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS

PREFILL, DECODE, RECOMPUTE = Kind.PREFILL, Kind.DECODE, Kind.RECOMPUTE


def recomputes(policy: Listening) -> Counter[int]:
    """Tokens of the prefills from nothing that it was told of."""
    return Counter(seen.tokens for seen in policy.seen if seen.action is Action.RECOMPUTE)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Names a scheduler that prefills so many tokens a step."""

    def make(budget: int) -> str:
        monkeypatch.setitem(SCHEDULERS, "chunked", type("Pieces", (Chunked,), {"pieces": budget}))
        return "chunked"

    return make


def lines(run, number: int) -> list[tuple]:
    """What was done for a request, in order."""
    return [entry[1:] for step in run.trace.steps for entry in step.token_spans if entry.request == number]


# -- what a work is


@pytest.mark.parametrize(
    ("prompt", "computed", "cached", "length", "tokens", "expected", "decodes"),
    [
        (5, 0, 0, 5, 5, [(PREFILL, 0, 5)], False),
        (5, 4, 4, 5, 1, [(PREFILL, 4, 5)], False),  # the last token of a prompt is no decode
        (1, 0, 0, 1, 1, [(PREFILL, 0, 1)], False),
        (5, 5, 5, 6, 1, [(DECODE, 5, 6)], True),
        (5, 7, 0, 8, 8, [(RECOMPUTE, 0, 7), (DECODE, 7, 8)], False),
        (5, 7, 0, 8, 4, [(RECOMPUTE, 0, 4)], False),
        (5, 7, 6, 8, 1, [(RECOMPUTE, 6, 7)], False),  # one generated token, but not for the first time
        (5, 7, 7, 8, 1, [(DECODE, 7, 8)], True),
        (5, 2, 0, 5, 5, [(RECOMPUTE, 0, 2), (PREFILL, 2, 5)], False),
    ],
)
def test_a_work_says_what_it_does(prompt, computed, cached, length, tokens, expected, decodes) -> None:
    request = Request(3, [0] * prompt, GREEDY, 0.0)
    request.tokens += [0] * (length - prompt)
    request.cached, request.computed = cached, computed
    chunk = request.chunk(tokens)
    assert chunk.token_spans == [(3, *line) for line in expected]
    assert chunk.decodes == request.decoding == decodes and chunk.completes == (cached + tokens == length)


# -- chunked prefills


def test_prompts_in_pieces_are_taught_whole(lab, in_pieces) -> None:
    """What was taught before: prompts of 33 and 41 tokens as recomputes of 6 and 5, and recoveries never closed."""
    policy = Listening(lambda tokens: Action.RECOMPUTE)
    run = lab.simulated(16, scheduler=in_pieces(8), policy=policy)
    for prompt in (9, 33, 20, 41):
        run.submit([0] * prompt, Sampling(20), 0.0)
    run.finish()
    taken = Counter(recovery.tokens for recovery in run.trace.recoveries)
    assert len(run.trace.recoveries) == sum(request.preemptions for request in run.requests) > 1
    assert recomputes(policy) == Counter((9, 33, 20, 41)) + taken
    for recovery in run.trace.recoveries:
        lost = [end for kind, _, end in lines(run, recovery.request) if kind is RECOMPUTE]
        assert 0 < recovery.tokens <= max(lost) + 8 and recovery.recompute_s > 0
    assert not run.engine.preemptor._open and not run.engine.preemptor._prefills


def test_who_is_preempted_on_the_way_back_has_two_recoveries(lab, in_pieces) -> None:
    run = lab.simulated(60, scheduler=in_pieces(8))
    request = run.submit([0] * 20, Sampling(4))
    run.until(lambda: request.decoding)
    run.engine.scheduler.preempt(request)
    run.step()
    run.engine.scheduler.preempt(request)
    run.finish()
    assert [recovery.tokens for recovery in run.trace.recoveries] == [8, 21]
    assert run.engine.token_counts == {PREFILL: 20, DECODE: 3, RECOMPUTE: 8 + 20}


def test_half_a_prompt_that_was_evicted_is_recomputed_and_then_prefilled(lab, in_pieces) -> None:
    run = lab.simulated(60, scheduler=in_pieces(8))
    request = run.submit([0] * 30, Sampling(1))
    run.step()
    run.step()
    run.engine.scheduler.preempt(request)
    run.finish()
    pieces = [(PREFILL, 0, 8), (PREFILL, 8, 16), (RECOMPUTE, 0, 8), (RECOMPUTE, 8, 16), (PREFILL, 16, 24)]
    assert lines(run, 0) == [*pieces, (PREFILL, 24, 30)]
    (recovery,) = run.trace.recoveries
    assert (recovery.reason, recovery.tokens) == ("partial prefill", 16)


# -- whatever the schedule


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 16), st.floats(0, 20)), min_size=1, max_size=9),
    scheduler=st.sampled_from([*SCHEDULERS, *["prefill_first"] * 2, *["chunked"] * 5]),
    budget=st.integers(1, 30),
    spare=st.integers(0, 12),
    host_blocks=st.sampled_from([0, 8, 1000]),
    overlap=st.booleans(),
    victim=st.sampled_from(sorted(VICTIMS)),
    seed=st.integers(0, 2**32),
)
def test_every_token_is_booked_once(
    lab, asked, scheduler: str, budget: int, spare: int, host_blocks: int, overlap: bool, victim: str, seed: int
) -> None:
    """Swaps and recomputes mixed at random; what is cancelled ends its lines early."""
    rng = random.Random(seed)
    policy = Listening(lambda tokens: rng.choice(list(Action)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULERS, "chunked", type("Pieces", (Chunked,), {"pieces": budget}))
        run = lab.simulated(
            lab.smallest_pool([one[:2] for one in asked], 4) + spare,
            policy=policy,
            scheduler=scheduler,
            host_blocks=host_blocks,
            overlap=overlap,
            victim=victim,
        )
    run.offer(*asked)
    gone = rng.randrange(len(asked)) if rng.random() < 0.2 else None
    while run.engine.busy:
        run.step()
        if gone is not None and rng.random() < 0.1:
            run.engine.cancel(run.requests[gone])
            run.audit()
    run.all_back()
    total: Counter[Kind] = Counter()
    for request, (prompt, new, _) in zip(run.requests, asked, strict=True):
        done: set[int] = set()
        lengths: Counter[Kind] = Counter()
        for kind, start, end in lines(run, request.number):
            tokens = set(range(start, end))
            assert tokens <= done if kind is RECOMPUTE else not tokens & done, "booked twice, or recomputed for nothing"
            assert kind is RECOMPUTE or (kind is PREFILL) == (end <= prompt)
            done |= tokens
            lengths[kind] += end - start
        assert request.preemptions or not lengths[RECOMPUTE]
        if request.number != gone:
            assert done == set(range(prompt + new - 1)) and lengths[PREFILL] == prompt and lengths[DECODE] == new - 1
        total += lengths
    assert run.engine.token_counts == total
    if gone is None:
        assert len(run.trace.recoveries) == sum(request.preemptions for request in run.requests)
        assert not run.engine.preemptor._open and not run.engine.preemptor._prefills
    undisturbed = Counter(
        request.prompt_tokens for request in run.requests if not request.preemptions and request.output
    )
    assert not undisturbed - recomputes(policy), "a whole prompt was not taught"
    for step in run.trace.steps:
        assert sum(new for _, new in step.prefills) + len(step.contexts) == sum(
            e.end - e.start for e in step.token_spans
        )
        assert len(step.contexts) <= sum(entry.kind is DECODE for entry in step.token_spans)
