"""Iteration-level scheduling (Orca, Yu et al., OSDI 2022): requests join and leave between two steps."""

from __future__ import annotations

from typing import ClassVar

from firsttoken.engine.request import Work
from firsttoken.engine.schedulers.scheduler import Scheduler


class IterationLevel(Scheduler):
    """Whole prompts share a step with decodes. Blocks are reserved at admission, so nobody is preempted."""

    name: ClassVar[str] = "iteration_level"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[Work]:
        works = self.decodes()
        return works + self.prefills(reserve=True)
