"""What tests of replicas that borrow share: how patient they are, how small their steps, and when they are done."""

from __future__ import annotations

from waiting import reached

from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.request import Request
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.server import RunningServer
from firsttoken.petals.timeouts import Timeouts
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica

SHORT = Timeouts(step_s=0.5, token_s=0.001)  # of who waits for a neighbour that falls silent
TIMEOUTS = Timeouts(step_s=60.0)  # else a pause of the machine is a neighbour lost, and whoever counts on it hangs
SMALL = EngineConfig(scheduler="sarathi", requests=4, token_budget=7)


def until(request: Request, tokens: int, replica: BorrowingReplica) -> None:
    """Step until so many tokens have been said."""
    while len(request.output) < tokens:
        replica.step()


def nothing_is_left(server: RunningServer) -> None:
    """Wait until no session is open, and find no sequence."""
    wait_for(reached(lambda: not server.sessions.open))
    assert server.sessions.slots.held == 0
