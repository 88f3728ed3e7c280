"""Recompute whatever the length."""

from __future__ import annotations

from firsttoken.engine.preemption.preemption_policy import Action, PreemptionPolicy


class Recompute(PreemptionPolicy):
    """Always recompute: what vLLM does with a request that has one sequence (errata I23)."""

    name = "recompute"

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.RECOMPUTE
