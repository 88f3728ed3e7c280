"""Swap whatever the length."""

from __future__ import annotations

from firsttoken.engine.preemption.preemption_policy import Action, PreemptionPolicy


class Swap(PreemptionPolicy):
    """Always swap: one of the two static policies that the paper compares with."""

    name = "swap"

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.SWAP
