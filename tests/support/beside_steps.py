"""A simulated device on which what comes back from the host passes beside the steps, as over a link of its own."""

from __future__ import annotations

from typing import Any

from firsttoken.engine.request import Request
from firsttoken.engine.simulated import ChargedCopy, CopyBesideSteps, SimulatedExecutor


class BesideSteps(SimulatedExecutor):
    """A swap-in passes beside the steps instead of between them; both ways share one link."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link_free_s = 0.0

    def swap_out(self, request: Request) -> ChargedCopy | None:
        before = self._now
        self._now = max(before, self._link_free_s)
        charged = super().swap_out(request)
        if charged is None:
            self._now = before
        return charged

    def swap_in(self, request: Request) -> CopyBesideSteps:
        seconds = self.costs_at(self._now).swap_in_s(request.cached - request.head)
        self._link_free_s = max(self._now, self._link_free_s) + seconds
        return CopyBesideSteps(self, self._link_free_s, ChargedCopy(seconds))
