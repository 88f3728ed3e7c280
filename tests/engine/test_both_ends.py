"""A request comes back from both ends, or its blocks were written through: the same tokens, less to copy."""

from __future__ import annotations

import pytest
from engine_fixtures import ANSWER
from listening import Listening

from firsttoken.cps.policies.cross_point import BothEnds
from firsttoken.engine.preemption import Action
from firsttoken.engine.request import Phase, Sampling
from firsttoken.engine.swap import PATHS
from firsttoken.simulation.costs.published import PublishedCosts


def both_ends() -> Listening:
    return Listening(lambda tokens: Action.BOTH_ENDS)


def under_pressure(lab, subject, **options):
    """Six long requests in a pool for little more than one, served; their run."""
    run = lab.live(subject.model, 20, host_blocks=200, **options)
    for one in subject.known[-6:]:
        run.submit(one.prompt, Sampling(ANSWER), 0.0)
    outputs = run.finish()
    assert outputs == [list(one.answer) for one in subject.known[-6:]]
    return run


@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("scheduler", ["prefill_first", "sarathi"])
@pytest.mark.parametrize("swap", sorted(PATHS))
def test_the_tokens_are_those_of_a_request_that_stayed(lab, llama, swap, scheduler, write_through) -> None:
    """The head is a whole number of blocks, and each recovery is booked once."""
    options = {"swap": swap, "scheduler": scheduler, "write_through": write_through}
    run = under_pressure(lab, llama, policy=both_ends(), requests=64, token_budget=64, **options)
    both = [recovery for recovery in run.trace.recoveries if recovery.action is Action.BOTH_ENDS]
    assert len(both) >= 3 and all(recovery.reason == "policy" for recovery in both)
    assert any(recovery.recompute_s > 0 and recovery.in_s > 0 for recovery in both)


def test_both_parts_are_needed(lab, llama) -> None:
    """The control: where the copy is spoilt, or the head is not computed, tokens change."""
    known = llama.known[-6:]
    for spoilt in ("copy", "head"):
        run = lab.live(llama.model, 20, host_blocks=200, policy=both_ends())
        for one in known:
            run.submit(one.prompt, Sampling(ANSWER), 0.0)
        while run.engine.busy:
            for request in run.requests:
                if request.phase is Phase.SWAPPED and request.head and spoilt == "copy":
                    run.engine.executor.host_pool.rows(request.host)[:] = 0
                if request.phase is Phase.RESTORING and spoilt == "head" and request.blocks:
                    run.engine.executor.pool.rows[request.blocks[0]] = 0
            run.step()
        run.all_back()
        assert [request.output for request in run.requests] != [list(one.answer) for one in known], spoilt


def test_a_request_may_end_or_be_preempted_again_on_its_way_back(lab, llama) -> None:
    """Blocks and host rows all come back; whoever stays says its own tokens."""
    for moment in range(12):
        run = lab.live(llama.model, 20, host_blocks=200, policy=both_ends(), swap="overlapped")
        for one in llama.known[-6:]:
            run.submit(one.prompt, Sampling(ANSWER), 0.0)
        cancelled = None
        while run.engine.busy:
            coming = [request for request in run.requests if request.head and request.phase is not Phase.SWAPPED]
            if coming and cancelled is None and moment == 0:
                cancelled = coming[0]
                run.engine.cancel(cancelled)
            moment -= bool(coming)
            run.step()
        for request, one in zip(run.requests, llama.known[-6:], strict=True):
            assert request is cancelled or request.output == list(one.answer)
        run.all_back()


def test_the_way_back_takes_the_longer_of_both_and_not_their_sum(lab) -> None:
    """Toy: 1 s a step, 0.01 a prefill token; 0.02 and 0.03 a token out and in. Of 8 tokens 4 are computed again."""
    run = lab.simulated(4, host_blocks=10, policy=both_ends())
    for _ in range(2):
        run.submit([0] * 8, Sampling(8), 0.0)
    run.finish()
    (recovery,) = run.trace.recoveries
    assert (recovery.action, recovery.tokens) == (Action.BOTH_ENDS, 12)
    assert (recovery.out_s, recovery.in_s, recovery.recompute_s) == pytest.approx((0.08, 0.12, 1.04))
    stayed, back = run.requests
    assert back.times_s[1] == pytest.approx(stayed.times_s[-1] + 1.04 + 1.1)  # the copy was over before


def test_at_the_papers_crossing_both_ends_are_cheaper_than_either() -> None:
    costs = PublishedCosts(decode_s=0.03)
    swap_s, recompute_s = costs.swap_s(927), costs.recompute_s(927)
    assert swap_s == pytest.approx(recompute_s, rel=0.01)
    plain, written = BothEnds(costs), BothEnds(costs, written_through=True)
    assert plain.choose(927, 0.0) is written.choose(927, 0.0) is Action.BOTH_ENDS
    assert plain.seconds(plain.head(927, 0.0), 927) < 0.9 * swap_s
    assert written.seconds(written.head(927, 0.0), 927) < 0.6 * swap_s
    assert plain.choose(16, 0.0) is Action.SWAP  # a pass has a price of its own


@pytest.mark.parametrize("swap", sorted(PATHS))
def test_what_was_written_through_is_not_copied_again(lab, llama, swap: str) -> None:
    """At a swap one block is left to copy, the one that is not full."""
    copied: list[int] = []
    runs = {}
    for write_through in (False, True):
        run = lab.live(llama.model, 20, host_blocks=200, preemption="swap", swap=swap, write_through=write_through)
        path, save = run.engine.executor.path, run.engine.executor.swap_out
        blocks_out = path.out

        def counted(blocks, span, out=blocks_out):
            copied.append(len(blocks))
            return out(blocks, span)

        def swapped(request, save=save, write_through=write_through):
            copied.clear()
            times = save(request)
            runs.setdefault(write_through, []).append(sum(copied))
            return times

        path.out, run.engine.executor.swap_out = counted, swapped
        for one in llama.known[-6:]:
            run.submit(one.prompt, Sampling(ANSWER), 0.0)
        assert run.finish() == [list(one.answer) for one in llama.known[-6:]]
    assert max(runs[True]) <= 1 < min(runs[False])


def test_without_room_on_the_host_nothing_is_written_through(lab, llama) -> None:
    run = lab.live(llama.model, 20, host_blocks=3, preemption="swap", write_through=True)
    for one in llama.known[-6:]:
        run.submit(one.prompt, Sampling(ANSWER), 0.0)
    assert run.finish() == [list(one.answer) for one in llama.known[-6:]]
    assert {recovery.reason for recovery in run.trace.recoveries} == {"host pool full"}
