"""A lender that dies while requests of its borrower are preempted: what the borrower says is still the plain model's.

Tiny random weights, fp32. Of a request that is swapped out, the host has the keys and values of own layers, and the
lender those of the others, which die with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest
from borrowing import TIMEOUTS
from plain_tokens import check_greedy
from swarms import DEPTH, Asked

from firsttoken.cps.policies import make_policy
from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.request import Request, Sampling
from firsttoken.petals.timeouts import Timeouts
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica

pytestmark = pytest.mark.long(seconds=30)

CONFIG = EngineConfig(scheduler="sarathi", requests=6, token_budget=9, watermark=0.0)
TOKENS = 14
POOL = {"blocks": 12, "block_tokens": 4, "host_blocks": 100}  # one request fits with a part of another
FAULTS = {  # how often each is tried, and how long a step is waited for
    "kill": (2, TIMEOUTS),  # kill -9
    "cut": (3, TIMEOUTS),  # a link that is reset
    "hold": (1, Timeouts(step_s=3.0, token_s=0.001)),  # one that falls silent: on a busy machine a healthy one may, too
}


@pytest.fixture(scope="module")
def known(asked) -> list[Asked]:
    return [asked(length, TOKENS) for length in range(14, 20)]


def steps(made: BorrowingReplica) -> Iterator[None]:
    """Step until no request is open; what was lent comes once the lender is found to be gone."""
    while made.engine.busy:
        if made.lease.gone and (lacking := DEPTH - made.arrivals.layers):
            made.arrivals.come(lacking)
        made.step()
        made.engine.pool.check()
        yield


def waits(request: Request, policy: str) -> bool:
    """Whether it was preempted and has not come back: where the policy swaps, with a copy on the host."""
    if policy == "recompute":
        return bool(request.preemptions) and not request.blocks and not request.finished
    return request.host is not None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy", ["swap", "cross_point", "recompute"])
def test_answers_are_the_plain_models(replica, member, known, policy, fault) -> None:
    """Some layers are here when it dies, which is before one of the steps in which a preempted request waits."""
    schedules, timeouts = FAULTS[fault]
    for seed in range(schedules):
        rng, lender = random.Random(seed), member()
        named = make_policy(policy, **({"threshold": 20} if policy == "cross_point" else {}))
        with closing(replica(lender.proxy.address, CONFIG, policy=named, timeouts=timeouts, **POOL)) as made:
            made.arrivals.come(1 + rng.randint(1, DEPTH - 1))
            requests, left = [made.submit(one.prompt, Sampling(TOKENS)) for one in known], rng.randint(1, 5)
            for _ in steps(made):
                left -= any(waits(request, policy) for request in requests)
                if left == 0:
                    getattr(lender, fault)()
                    lender.gone, left = fault == "kill", 999
            assert left > 5 and made.lease.gone and made.here == DEPTH
            for request, one in zip(requests, known, strict=True):
                assert check_greedy(request.output, one.plain) == TOKENS
            assert made.engine.pool.free == made.engine.pool.count
        if fault != "kill":
            lender.heal()
