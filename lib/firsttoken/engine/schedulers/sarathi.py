"""Stall-free batches of chunked prefills (Sarathi-Serve, Agrawal et al., OSDI 2024, Algorithm 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.scheduler_config import SchedulerConfig
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.study.errors import ProfileError


class Sarathi(Scheduler):
    """Every ready decode is in every batch; what the token budget leaves goes to chunks of prompts.

    Prompts that have begun go before new ones, first come, first served. In a step that had to preempt, and while
    anyone is swapped out, nobody new begins.
    """

    name: ClassVar[str] = "sarathi"
    steady: ClassVar[bool] = True

    @classmethod
    def check(cls, config: SchedulerConfig) -> None:
        if config.token_budget < config.requests:
            raise ProfileError(
                f"engine: a token budget of {config.token_budget} cannot hold a token of each of {config.requests} "
                "requests; raise token_budget or lower requests"
            )

    def schedule(self) -> list[ScheduledChunk]:
        chunks, calm = self.ready()
        return chunks + self.chunks(self.budget(chunks) - len(chunks), admit=calm and not self.swapped)

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        """Tokens that the coming step may hold, those of its ``decodes`` included."""
        return self.config.token_budget
