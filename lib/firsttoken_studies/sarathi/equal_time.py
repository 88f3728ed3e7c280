"""Chunks that take as long as each other, whatever stands behind them: later ones of a prompt are shorter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.costs.model import Costs
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.work import Work


def equal_time(costs: Costs, seconds: float) -> type[Sarathi]:
    """Sarathi with the budget that a step of ``seconds`` holds by ``costs``, and a block more than it decodes at least.

    A chunk attends to all before it, so that of equal chunks the last takes longest; on stages one batch then waits for
    another (Sarathi-Serve, 3.3). No step prefills more than ``prefill_tokens``.
    """

    class EqualTime(Sarathi):
        name: ClassVar[str] = "equal_time"

        def budget(self, decodes: Sequence[Work]) -> int:
            contexts = [work.start for work in decodes]
            begun = next((request.cached for request in self.running if not request.decoding), 0)
            low, high = self.block_tokens, self.bounds.prefill_tokens
            while low < high:
                middle = (low + high + 1) // 2
                fits = costs.step_s([(begun, middle)], contexts) <= seconds
                low, high = (middle, high) if fits else (low, middle - 1)
            return len(decodes) + low

    return EqualTime
