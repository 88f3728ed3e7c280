"""Iteration-level scheduling (Orca, Yu et al., OSDI 2022): requests join and leave between two steps."""

from __future__ import annotations

from typing import ClassVar

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.scheduler import Scheduler


class IterationLevel(Scheduler):
    """Whole prompts share a step with decodes. Blocks are reserved at admission, so nobody is preempted."""

    name: ClassVar[str] = "iteration_level"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        chunks = self.decodes()
        return chunks + self.prefills(reserve=True)
