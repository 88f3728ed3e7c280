"""Chunks sized by the slack of the tightest decode, prompts by deadline (Niyama, Goel et al., arXiv 2503.22562)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.request import Request, Work
from firsttoken.engine.schedulers.adaptive_budget import AdaptiveBudget


class Deadline(AdaptiveBudget):
    """The first token of a request is due ``ttft_s`` after its arrival, each further one ``tbt_s`` later.

    A request whose tokens came early has slack, and the step may take as long as the least slack of all decodes. One
    that is behind is due ``tbt_s`` after its last token: what is lost is not caught up at the price of the prompts
    that wait, which would be late then, too, and the next ones after them. The prompt whose first token is due first
    begins first.
    """

    name: ClassVar[str] = "deadline"

    def budget(self, decodes: Sequence[Work]) -> int:
        now = self.preemptor.executor.now()
        self.arrange(lambda request: (self._due(request), request.number))
        slack = min((self._decode_due(work.request) - now for work in decodes), default=self.bounds.tbt_s)
        return len(decodes) + self.room(decodes, max(slack, 0.0))

    def first_s(self, request: Request) -> float:
        """Seconds from its arrival to when the first token of ``request`` is due."""
        return self.bounds.ttft_s

    def _due(self, request: Request) -> float:
        """When the next token of ``request`` was promised."""
        return request.arrival_s + self.first_s(request) + self.bounds.tbt_s * len(request.times_s)

    def _decode_due(self, request: Request) -> float:
        """When the next token of ``request``, which has one, is due."""
        return max(self._due(request), request.times_s[-1] + self.bounds.tbt_s)
