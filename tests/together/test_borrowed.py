"""A replica that borrows says what the whole model says, wherever the boundary is and whenever it moves: tiny random
weights, fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from plain_tokens import check_greedy
from swarms import DEPTH, Here

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.swarm.background import wait_for
from firsttoken.swarm.patience import Patience
from firsttoken.together.borrowed.arrivals import Arrivals
from firsttoken.together.borrowed.loan import Loan
from firsttoken.together.borrowed.replica import BorrowingReplica

PATIENCE = Patience(step_s=0.5, token_s=0.001)
SMALL = EngineConfig(scheduler="sarathi", requests=4, token_budget=7)
TOKENS = 9


@pytest.fixture(scope="module")
def neighbour(ends_folder) -> Iterator[Here]:
    """One for the whole file: nothing of what it lends may be left in it."""
    here = Here(ends_folder)
    here.server = here.serve((0, DEPTH))[0]
    yield here
    here.close()


@pytest.fixture
def replica(lent, neighbour) -> Iterator[Callable[..., BorrowingReplica]]:
    made = []

    def make(address: str = "", config: EngineConfig = SMALL, model: str = "") -> BorrowingReplica:
        """Its layers are those of the whole model, and used when they are said to have come."""
        arrivals, executor = Arrivals(DEPTH), LiveExecutor(lent, 64)
        loan = Loan(address or neighbour.server.record.address, model or neighbour.model, DEPTH, 32, patience=PATIENCE)
        one = BorrowingReplica(executor, lent.model.layers, arrivals, loan, config)
        one.arrivals = arrivals
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def until(request, tokens: int, replica) -> None:
    while len(request.output) < tokens:
        replica.step()


def nothing_is_left(server) -> None:
    async def gone() -> None:
        import asyncio

        while server.sessions.open:
            await asyncio.sleep(0.01)

    wait_for(gone())
    assert server.sessions.room.held == 0


def test_every_boundary_to_every_other(replica, neighbour, asked):
    one = asked(17, 6)
    for before, after in combinations(range(DEPTH + 1), 2):
        made = replica()
        made.arrivals.come(1 + before)
        request = made.submit(one.prompt, Sampling(6))
        until(request, 2, made)
        assert made.here == before
        made.arrivals.come(after - before)
        until(request, 6, made)
        assert made.here == after and not made.loan.steps == 0
        assert check_greedy(request.output, one.plain) == 6
        made.close()
    nothing_is_left(neighbour.server)
