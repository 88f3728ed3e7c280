"""Chooses layers by a profile: critical layers, the Pareto frontier, the fewest layers in a bound (DroidSpeak, 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from firsttoken.droidspeak.layer_group import Group
from firsttoken.study.errors import RequestError
from firsttoken.study.stats import Interval, paired_bootstrap


@dataclass(frozen=True)
class Profiled:
    """A group with the scores of the same items under the receiver's own cache and under the mixed one, in 0..1."""

    group: Group
    own: tuple[float, ...]
    mixed: tuple[float, ...]

    @cached_property
    def loss(self) -> Interval:
        """Mean loss of score against the receiver's own cache, with its interval over items; absolute, in 0..1."""
        return paired_bootstrap(self.own, self.mixed)

    @cached_property
    def absolute_loss(self) -> float:
        """The mean loss alone: what a choice that is made hundreds of times asks for."""
        return float(np.subtract(self.own, self.mixed).mean())

    @cached_property
    def relative_loss(self) -> float:
        """The mean loss as a share of the receiver's own score; 0 where that is 0."""
        own_total = sum(self.own)
        return (own_total - sum(self.mixed)) / own_total if own_total else 0.0


def critical_layers(scores: Iterable[tuple[int, float]], own_score: float, share: float) -> list[int]:
    """Layers whose reuse alone costs more than ``share`` of the score ``own_score``; ``scores`` are (layer, score)
    pairs."""
    return [layer for layer, score in scores if own_score - score > share * own_score]


def frontier(groups: Sequence[Profiled]) -> list[Profiled]:
    """The groups that no other one beats: none has as few layers and less loss. From few layers to many.

    Of groups of one size and loss the lowest counts.
    """
    best: list[Profiled] = []
    for candidate in sorted(groups, key=lambda g: (len(g.group), g.relative_loss, g.group.lo)):
        if not best or candidate.relative_loss < best[-1].relative_loss:
            best.append(candidate)
    return best


def smallest_within(groups: Sequence[Profiled], bound: float, *, absolute: bool = False) -> Profiled:
    """The group of fewest layers whose loss is at most ``bound`` of the receiver's own score; of equals the least loss.

    ``absolute``: at most ``bound`` in the unit of the score (0.05: five points), as the report reads it (errata I41).
    Raises RequestError when there is none, which cannot be where the group of all layers was profiled.
    """
    within = [g for g in groups if (g.absolute_loss if absolute else g.relative_loss) <= bound]
    if not within:
        raise RequestError(f"no profiled group loses at most {100 * bound:g} %; profile the group of all layers too")
    return min(within, key=lambda g: (len(g.group), g.relative_loss, g.group.lo))
