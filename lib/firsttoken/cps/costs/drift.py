"""Costs that change while the engine runs: a link that slows down, a model that grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class ScaledCosts(Costs):
    """Costs whose swaps take ``swap`` times and whose steps take ``compute`` times as long as ``costs`` say."""

    costs: Costs
    swap: float
    compute: float

    def __post_init__(self) -> None:
        if self.swap <= 0 or self.compute <= 0:
            raise ProfileError(f"scaled costs: factors must be above 0, not swap {self.swap}, compute {self.compute}")

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        return self.compute * self.costs.step_s(prefills, contexts)

    def swap_out_s(self, tokens: int) -> float:
        return self.swap * self.costs.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        return self.swap * self.costs.swap_in_s(tokens)


def scaled(costs: Costs, swap: float = 1.0, compute: float = 1.0) -> Costs:
    """``costs`` over a link slower by ``swap``, and for a model larger (or a device busier) by ``compute``."""
    return ScaledCosts(costs, swap, compute)


@dataclass(frozen=True)
class Drift:
    """Costs that change over time: ``changes`` are (seconds since the start, costs), the first at 0, increasing."""

    changes: tuple[tuple[float, Costs], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", tuple(self.changes))
        starts = [from_s for from_s, _ in self.changes]
        if not starts or starts[0] != 0:
            raise ProfileError(f"drift: the first costs must hold from 0 s; the changes are at {starts} s")
        if any(later <= earlier for earlier, later in pairwise(starts)):
            raise ProfileError(f"drift: changes must come one after the other, not at {starts} s")

    def at(self, now_s: float) -> Costs:
        """The costs that hold at ``now_s``; before 0 s those of the start."""
        return self.changes[max(0, bisect_right(self.changes, now_s, key=lambda change: change[0]) - 1)][1]
