"""A simulated device on which what comes back from the host passes beside the steps, as over a link of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firsttoken.engine.request import Request
from firsttoken.engine.simulated import ChargedCopy, SimulatedExecutor


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

    def swap_in(self, request: Request) -> ComingBack:
        seconds = self.costs_at(self._now).swap_in_s(request.cached)
        self._link_free_s = max(self._now, self._link_free_s) + seconds
        return ComingBack(self, self._link_free_s, ChargedCopy(seconds))


@dataclass(frozen=True)
class ComingBack:
    """A way back that ends at ``ends_s``."""

    executor: BesideSteps
    ends_s: float
    charged: ChargedCopy

    @property
    def done(self) -> bool:
        return self.executor.now() >= self.ends_s

    def wait(self) -> ChargedCopy:
        self.executor.wait_until(self.ends_s)
        return self.charged
