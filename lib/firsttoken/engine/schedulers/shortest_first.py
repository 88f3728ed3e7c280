"""Short prompts first, and a bound on how long the others wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.engine.schedulers.sarathi import Sarathi


class ShortestFirst(Sarathi):
    """Sarathi's batches; of the waiting prompts the one with the fewest tokens left begins first.

    Whoever has waited ``wait_s`` goes before all who have not, first come, first served: from then on nobody who came
    later begins before it. So does whoever has begun and had to give way: its client waits in the middle of an answer,
    and what it has to compute again grows with every token that it had.
    """

    name: ClassVar[str] = "shortest_first"

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        now = self.preemptor.executor.now()

        def turn(request: Request) -> tuple[bool, float, tuple[float, int]]:
            young = request.begun_s is None and now - request.arrival_s < self.config.wait_s
            return young, request.remaining if young else 0, request.order

        self.sort_waiting(turn)
        return self.config.token_budget
