"""A load that changes: requests of many light tenants and of a heavy one, at a rate that is now low and now high."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from firsttoken.engine.workload.items import Item
from firsttoken.study.errors import ProfileError

LIGHT, HEAVY = 50, 90  # percentiles: light tenants' prompts are up to the one, the heavy one's from the other on


@dataclass(frozen=True)
class Phases:
    """``rate`` requests a second on average of a phase of factor 1; each of ``factors`` holds for ``phase_s`` seconds.

    ``heavy`` is the share of requests that the heavy tenant sends.
    """

    rate: float
    factors: tuple[float, ...]
    phase_s: float
    heavy: float

    def __post_init__(self) -> None:
        if not self.factors or min(self.rate, self.phase_s, *self.factors) <= 0 or not 0 < self.heavy < 1:
            raise ProfileError(
                "changing load: rate, phase_s and all factors must be above 0, heavy between 0 and 1, and at least "
                "one factor given"
            )

    @property
    def count(self) -> int:
        """The requests expected in all phases; so many come in every draw."""
        return max(2, round(self.rate * self.phase_s * sum(self.factors)))

    def times_s(self, seed: int) -> np.ndarray:
        """Arrival times [count], ascending: a Poisson process of changing rate, given how many come in all."""
        expected = np.concatenate([[0.0], np.cumsum(self.factors)])
        drawn = np.sort(np.random.default_rng([seed, 0]).random(self.count)) * expected[-1]
        return np.interp(drawn, expected, self.phase_s * np.arange(len(expected)))

    def phase_at(self, at_s: np.ndarray) -> np.ndarray:
        """The number of the phase at each of ``at_s`` [n]; after the last it is still the last."""
        return np.minimum(np.asarray(at_s) // self.phase_s, len(self.factors) - 1).astype(int)


@dataclass(frozen=True)
class ChangingLoad:
    """A workload, and which of its requests are the ``heavy`` tenant's [requests]."""

    items: tuple[Item, ...]
    heavy: np.ndarray

    @classmethod
    def drawn(cls, pairs: np.ndarray, phases: Phases, seed: int) -> ChangingLoad:
        """Lengths from ``pairs`` [n, 2] of (prompt, answer) tokens, with replacement; at least one of either kind."""
        draw, count = np.random.default_rng([seed, 1]), phases.count
        heavy = np.zeros(count, dtype=bool)
        heavy[draw.permutation(count)[: min(count - 1, max(1, round(phases.heavy * count)))]] = True
        low, high = np.percentile(pairs[:, 0], [LIGHT, HEAVY])
        light = draw.choice(pairs[pairs[:, 0] <= low], size=count)
        chosen = np.where(heavy[:, None], draw.choice(pairs[pairs[:, 0] >= high], size=count), light).tolist()
        times = phases.times_s(seed).tolist()
        items = (Item(at, prompt, answer, (0,) * prompt) for at, (prompt, answer) in zip(times, chosen, strict=True))
        return cls(tuple(items), heavy)
