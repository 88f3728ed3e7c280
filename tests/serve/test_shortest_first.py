"""Under ``serve --scheduler shortest_first`` no stream of short prompts keeps a long one from its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine
from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import STALL_FREE
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken_serve.served_model import serve_model
from firsttoken_serve.service_config import ServiceConfig

STEP_S, ANSWER = 0.02, 8
LONGEST_TURN_S = 2 * ANSWER * STEP_S  # who has a place is served to his end first


@dataclass(frozen=True)
class EvenSteps(Costs):
    """Every step takes as long, so one place gives an answer in ``ANSWER`` steps."""

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        return STEP_S

    def swap_out_s(self, tokens: int) -> float:
        return 0.0

    def swap_in_s(self, tokens: int) -> float:
        return 0.0


@pytest.mark.parametrize("seconds", [3, 30])
def test_the_bound_of_serve_holds(tmp_path: Path, seconds: int) -> None:
    """Two places, and a short prompt that comes whenever one could be free: the long one begins at its bound, or at
    the end of the stream, where that is earlier."""
    config = ServiceConfig(tmp_path, scheduler="shortest_first", max_running=2)
    server = serve_model(config, lambda error: None, context=4096)
    engine = Engine(SimulatedExecutor(EvenSteps(), 1000, block_tokens=16), server.limits.engine)
    every_s = ANSWER * STEP_S / 2
    for number in range(int(seconds / every_s)):
        for beside in range(2):
            engine.submit([1] * (5 + beside), Sampling(ANSWER), number * every_s)
    long = engine.submit([1] * 600, Sampling(4), 0.5)
    engine.run()
    waited_s = long.begun_s - long.arrival_s
    assert STALL_FREE.wait_s == 5.0
    if seconds > STALL_FREE.wait_s:
        assert STALL_FREE.wait_s <= waited_s <= STALL_FREE.wait_s + LONGEST_TURN_S
    else:
        assert waited_s <= STALL_FREE.wait_s + LONGEST_TURN_S
