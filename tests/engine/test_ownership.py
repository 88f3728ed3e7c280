"""Work never outlives the ownership of what it writes, and nothing is read that a step which failed was to
write."""

from __future__ import annotations

from collections import Counter

import pytest
from owned import BrokenStep, Failing, Guard, Ordeal, Prefixes

from firsttoken.engine.request import Sampling

ANSWER = 24


@pytest.fixture(scope="module")
def prefixes(llama) -> Prefixes:
    return Prefixes(llama.model)


def test_bystanders_say_what_they_say_alone(lab, llama, prefixes) -> None:
    seen = Counter()
    for seed in range(24):
        seen += Ordeal(lab, llama, prefixes, seed).go()
    wanted = ("bystanders", "swap: policy", "recompute: policy", "shared", "cancelled: its prefix is awaited")
    assert all(seen[what] for what in (*wanted, "step failed: before", "step failed: within", "step failed: after"))


@pytest.mark.parametrize("fails", ["before", "within", "after"])
@pytest.mark.parametrize("others", [0, 1])
def test_who_shares_blocks_of_a_step_that_failed_computes_them(lab, llama, fails: str, others: int) -> None:
    """The client of whoever was to fill them goes before the next step."""
    one = llama.known[-1]
    run = lab.live(llama.model, 60, kind=Failing, share_prefixes=True, scheduler="sarathi", token_budget=64, requests=8)
    guard = Guard(run.engine)
    for _ in range(2 + others):
        run.submit(one.prompt, Sampling(ANSWER))
    run.engine.executor.fails = fails
    with pytest.raises(BrokenStep):
        run.step()
    run.audit()
    run.engine.cancel(run.requests[0])
    guard.check()
    assert run.finish()[1:] == [list(one.answer)] * (1 + others)
    guard.check()
