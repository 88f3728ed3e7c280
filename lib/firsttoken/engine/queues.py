"""Where requests stand: four queues, one a phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from firsttoken.engine.request import Phase, Request


class Queues:
    """``waiting`` (new, or to be recomputed; those go first), ``running`` and ``restoring`` (they have blocks),
    ``swapped``. Only here does a request's phase change: it is the queue that it stands in."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.restoring: list[Request] = []
        self.swapped: list[Request] = []
        self._queues: dict[Phase, deque[Request] | list[Request]] = {
            Phase.WAITING: self.waiting,
            Phase.RUNNING: self.running,
            Phase.RESTORING: self.restoring,
            Phase.SWAPPED: self.swapped,
        }

    @property
    def full(self) -> int:
        """Requests that have blocks."""
        return len(self.running) + len(self.restoring)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Requests in each of the queues."""
        return tuple(map(len, self._queues.values()))

    def arrange(self, turn: Callable[[Request], Any]) -> None:
        """Whoever waits stands in the order of ``turn``, the least first."""
        ordered = sorted(self.waiting, key=turn)
        self.waiting.clear()
        self.waiting.extend(ordered)

    def stand(self, request: Request, phase: Phase) -> None:
        """Out of the queue of its phase, if it had come there, and to the end of the next one's."""
        if request in self._queues[request.phase]:
            self._queues[request.phase].remove(request)
        request.phase = phase
        if phase is not Phase.FINISHED:
            self._queues[phase].append(request)

    def go_first(self, request: Request) -> None:
        """It waits before all who never ran."""
        self.stand(request, Phase.WAITING)
        self.waiting.rotate(1)
