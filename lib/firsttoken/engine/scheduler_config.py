"""What a step may hold, and how long it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firsttoken import old_names
from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class SchedulerConfig:
    """``requests`` run at once, ``prefill_tokens`` are prefilled in one step (a longer prompt goes alone).

    ``overtake`` lets a swapped request that fits come back before an earlier one that does not (vLLM: no). Schedulers
    that cut prompts process ``token_budget`` tokens a step at most, or what ``tbt_s`` (seconds between two tokens of a
    request) and ``ttft_s`` (to its first) leave, or a step that takes ``stretch`` times what its decodes alone would;
    ``wait_s`` is how long one that prefers short prompts may let others wait. Raises ProfileError for what is below 1,
    or no time.
    """

    requests: int = 256
    prefill_tokens: int = 2048
    overtake: bool = False
    token_budget: int = 512
    tbt_s: float = math.inf
    ttft_s: float = math.inf
    wait_s: float = math.inf
    stretch: float = math.inf

    def __post_init__(self) -> None:
        for name in ("requests", "prefill_tokens", "token_budget"):
            if getattr(self, name) < 1:
                raise ProfileError(f"engine: {name} must be at least 1, not {getattr(self, name)}")
        for name in ("tbt_s", "ttft_s", "wait_s"):
            if not getattr(self, name) > 0:
                raise ProfileError(f"engine: {name} must be above 0, not {getattr(self, name)}")
        if not self.stretch > 1:
            raise ProfileError(f"engine: stretch must be above 1, not {self.stretch}")


__getattr__ = old_names.classes(__name__, Bounds="SchedulerConfig")
