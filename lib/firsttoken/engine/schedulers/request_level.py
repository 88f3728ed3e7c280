"""Request-level scheduling (FasterTransformer): a batch is closed until its last request ends."""

from __future__ import annotations

from typing import ClassVar

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.scheduler import Scheduler


class RequestLevel(Scheduler):
    """Blocks are reserved for all tokens that a request may have, so nobody is preempted."""

    name: ClassVar[str] = "request_level"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        decodes = self.decodes()
        return decodes + self.prefills(reserve=True, admit=not self.running)
