"""Policies that nobody would run, to find out what a gain is owed to."""

from __future__ import annotations

import random

from firsttoken.engine.preemption.base import Action, PreemptionPolicy


class Inverse(PreemptionPolicy):
    """The paper's rule the wrong way round: recompute up to ``threshold`` tokens, swap above."""

    name = "inverse"

    def __init__(self, threshold: float = 1024) -> None:
        self.threshold = threshold

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.RECOMPUTE if tokens <= self.threshold else Action.SWAP


class Coin(PreemptionPolicy):
    """Swap or recompute by the toss of a coin, whatever the length."""

    name = "coin"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, tokens: int, now_s: float) -> Action:
        return self._random.choice((Action.SWAP, Action.RECOMPUTE))
