"""The limits of a step, and the order in which preempted requests come back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firsttoken.engine.preemption.resume import AGED, IN_ORDER, ResumeOrder, resume_order_named
from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step: what it may hold, and how long it may take.

    ``requests`` run at once, ``prefill_tokens`` are prefilled in one step (a longer prompt goes alone). ``resume`` is
    the order in which preempted requests come back, by name (vLLM: in order) or one's own. Schedulers that cut prompts
    process ``token_budget`` tokens a step at most, or what ``tbt_s`` (seconds between two tokens of a request) and
    ``ttft_s`` (to its first) leave. ``wait_s`` is how long others may go ahead of a request, under a scheduler that
    prefers short prompts and the resume order "aged". Raises ProfileError for an unknown name, what is below 1, or no
    time.
    """

    requests: int = 256
    prefill_tokens: int = 2048
    resume: str | ResumeOrder = IN_ORDER
    token_budget: int = 512
    tbt_s: float = math.inf
    ttft_s: float = math.inf
    wait_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("requests", "prefill_tokens", "token_budget"):
            if getattr(self, name) < 1:
                raise ProfileError(f"engine: {name} must be at least 1, not {getattr(self, name)}")
        for name in ("tbt_s", "ttft_s", "wait_s"):
            if not getattr(self, name) > 0:
                raise ProfileError(f"engine: {name} must be above 0, not {getattr(self, name)}")
        resume_order_named(self.resume)
        if self.resume == AGED and self.wait_s == math.inf:
            raise ProfileError("engine: the resume order aged needs wait_s, the seconds that a request may be passed")
