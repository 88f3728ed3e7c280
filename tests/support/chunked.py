"""A scheduler that the engine does not have: prompts in pieces, beside decodes (Sarathi-Serve, Agrawal et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

from firsttoken.engine.schedulers.base import Scheduler
from firsttoken.engine.work import Work


class Chunked(Scheduler):
    """``budget`` tokens a step: decodes, then prompts that have begun, then new ones; evicts the last in line."""

    name: ClassVar[str] = "chunked"
    budget: ClassVar[int] = 5

    def schedule(self) -> list[Work]:
        away = len(self.swapped) + len(self.waiting)
        works = self.decodes()
        preempted = len(self.swapped) + len(self.waiting) > away
        if self.swapped and not preempted:
            before = len(self.running)
            self.resume()
            works += [self.work(request) for request in self.running[before:]]
        left = max(1, self.budget - len(works))  # else a budget below the decodes would starve the prompts
        for request in sorted(self.running, key=lambda request: request.order):
            if left and not request.decoding:
                works.append(self.work(request, min(left, request.todo)))
                left -= works[-1].tokens
        while left and not self.swapped and not preempted and (request := self.admit()) is not None:
            works.append(self.work(request, min(left, request.todo)))
            left -= works[-1].tokens
        return works
