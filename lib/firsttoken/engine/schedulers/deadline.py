"""Chunks sized by the slack of the tightest decode, prompts by deadline (Niyama, Goel et al., arXiv 2503.22562)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.request import Request
from firsttoken.engine.schedulers.adaptive_budget import AdaptiveBudget
from firsttoken.engine.work import Work


class Deadline(AdaptiveBudget):
    """The first token of a request is due ``ttft_s`` after its arrival, each further one ``tbt_s`` later.

    A request whose tokens came early has slack, and the step may take as long as the least slack of all decodes. The
    prompt whose first token is due first begins first.
    """

    name: ClassVar[str] = "deadline"

    def budget(self, decodes: Sequence[Work]) -> int:
        now = self.preemptor.executor.now()
        self.arrange(lambda request: (self._due(request), request.number))
        slack = min((self._due(work.request) - now for work in decodes), default=self.bounds.tbt_s)
        return len(decodes) + self.room(decodes, max(slack, 0.0))

    def _due(self, request: Request) -> float:
        """When the next token of ``request`` is due."""
        return request.arrival_s + self.bounds.ttft_s + self.bounds.tbt_s * len(request.times_s)
