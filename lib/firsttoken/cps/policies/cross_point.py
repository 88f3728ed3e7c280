"""The paper's policy: a threshold found by profiling (CPS, 3.3)."""

from __future__ import annotations

from firsttoken.engine.preemption.preemption_policy import Action, PreemptionPolicy
from firsttoken.study.errors import ProfileError


class CrossPoint(PreemptionPolicy):
    """Swap up to ``threshold`` tokens, recompute above. The paper sets 1,024; its own Table 2 crosses at 927 (I20)."""

    name = "cross_point"

    def __init__(self, threshold: float = 1024) -> None:
        if threshold < 0:
            raise ProfileError(f"cross_point: threshold must be 0 tokens or more, not {threshold}")
        self.threshold = threshold

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.SWAP if tokens <= self.threshold else Action.RECOMPUTE
