"""What an engine is told: who runs in a step, who gives way, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.engine.scheduler_config import SchedulerConfig
from firsttoken.engine.scheduler_state import Victim, victim_named
from firsttoken.engine.schedulers import scheduler_named
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class EngineConfig(SchedulerConfig):
    """How requests share the pool. ``scheduler`` is a name, or a class of one's own.

    ``victim`` says who is preempted (LIFO in the paper, 2.2), by name or as a choice of one's own; ``watermark`` is the
    share of blocks that admission leaves free (vLLM: 0.01; CPS: 0, 3.1). ``share_prefixes``: requests that begin alike
    share blocks; off, as the preemption policies are taught and measured with prefills from nothing. Raises
    ProfileError for an unknown name, and for bounds that the scheduler cannot keep.
    """

    scheduler: str | type[Scheduler] = "prefill_first"
    preemption: str = "recompute"
    victim: str | Victim = "last_arrived"
    watermark: float = 0.01
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        scheduler_named(self.scheduler).check(self)
        victim_named(self.victim)
        if not 0 <= self.watermark < 1:
            raise ProfileError(f"engine: watermark must be a share from 0 to below 1, not {self.watermark}")


DEFAULT_CONFIG = EngineConfig()
