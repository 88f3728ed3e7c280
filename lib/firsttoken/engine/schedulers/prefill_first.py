"""Prefill-first scheduling (vLLM 0.2, Kwon et al., SOSP 2023): prompts whenever there is room, else decodes."""

from __future__ import annotations

from typing import ClassVar

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.scheduler import Scheduler


class PrefillFirst(Scheduler):
    """Swapped requests come back before anyone new is admitted, and not in a step that had to preempt."""

    name: ClassVar[str] = "prefill_first"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        if chunks := self.prefills(admit=not self.swapped):
            return chunks
        return self.ready()[0]
