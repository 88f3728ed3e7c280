"""A preemption policy that does as a test says, and remembers what it was asked and told."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.engine.preemption.preemption_policy import Action, Observation, PreemptionPolicy


class Listening(PreemptionPolicy):
    """Does for a victim of so many tokens what ``choice`` says of them. ``asked`` are the tokens of all victims."""

    name = "listening"

    def __init__(self, choice: Callable[[int], Action]) -> None:
        self._choice = choice
        self.asked: list[int] = []
        self.seen: list[Observation] = []

    def choose(self, tokens: int, now_s: float) -> Action:
        self.asked.append(tokens)
        return self._choice(tokens)

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)
