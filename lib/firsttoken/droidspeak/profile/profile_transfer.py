"""Does a choice hold beyond the items that made it: on other items, and on another task (DroidSpeak, 5.4, Figure 17)?

A choice looks better on its own items than it is, so a task's own choice is judged as a foreign one is: half of the
items choose, the other half judges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.profile.pareto import Profiled
from firsttoken.study.errors import RequestError

Chooser = Callable[[Sequence[Profiled]], Profiled]
Judge = Callable[[Sequence[Profiled], Group], Sequence[float]]  # by item, what it loses over the group


@dataclass(frozen=True)
class TransferLoss:
    """The losses of choices on the items that judged them.

    ``item_loss``: by item, the loss of score (absolute, in 0..1) against the receiver's own cache, the mean over the
    choices that it judged. ``layers``: mean number of recomputed layers. ``groups``: every choice that was made.
    """

    item_loss: tuple[float, ...]
    layers: float
    groups: tuple[Group, ...]

    @property
    def usual(self) -> Group:
        """The group that was chosen most often."""
        return max(sorted(set(self.groups)), key=self.groups.count)


@dataclass(frozen=True)
class ResampledChoice:
    """A choice made on items drawn with replacement, and what it loses on those that were not drawn.

    ``relative_loss`` is a share of the receiver's own score on them.
    """

    group: Group
    relative_loss: float


def item_losses(groups: Sequence[Profiled], group: Group) -> list[float]:
    """Return by item the score that is lost over ``group``, one of ``groups``, against the receiver's own cache."""
    (judged,) = (profiled for profiled in groups if profiled.group == group)
    return [full - mixed for full, mixed in zip(judged.own, judged.mixed, strict=True)]


def transfer(
    choosing: Sequence[Profiled],
    judging: Sequence[Profiled],
    choose: Chooser,
    *,
    draws: int,
    seed: int = 0,
    on_same_items: bool = False,
    judge: Judge = item_losses,
) -> TransferLoss:
    """Choose on half of the items of ``choosing``, judge on half of those of ``judging``, for ``draws`` random splits.

    Both are profiles of one pair. Each split serves both ways, so every item judges ``draws`` choices. Where both are
    one task, the judging half did not choose, unless ``on_same_items``: then the choice is made on the very items that
    judge it. Raises RequestError for fewer than two items, or a group that only ``choosing`` has.
    """
    profiled_groups = {profiled.group for profiled in judging}
    if missing := [str(p.group) for p in choosing if p.group not in profiled_groups]:
        raise RequestError(f"group {missing[0]} was profiled on one task only; profile both with the same edges")
    sizes = [len(profiles[0].own) for profiles in (choosing, judging)]
    loss, groups = [0.0] * sizes[1], []
    for draw in range(draws):
        choosers, judges = (random_halves(size, seed + draw) for size in sizes)
        for side in (0, 1):
            judged = judges[1 - side]
            judging_half = select_items(judging, judged)
            chosen = choose(judging_half if on_same_items else select_items(choosing, choosers[side]))
            groups.append(chosen.group)
            for item, lost in zip(judged, judge(judging_half, chosen.group), strict=True):
                loss[item] += lost / draws
    return TransferLoss(tuple(loss), sum(map(len, groups)) / len(groups), tuple(groups))


def resampled(
    profiles: Sequence[Profiled], items: int, choose: Chooser, *, draws: int, seed: int = 0
) -> list[ResampledChoice]:
    """The choices that ``draws`` samples of ``items`` items would have made.

    Drawn with replacement, so that as many items as were profiled can be drawn and some are still left to judge; a draw
    that leaves none is drawn again. Raises RequestError unless ``items`` is 1 to all of at least two items.
    """
    item_count, rng, transfers = len(profiles[0].own), random.Random(seed), []
    if not 1 <= items <= item_count or item_count < 2:
        raise RequestError(
            f"cannot draw {items} of {item_count} items and judge on others; draw 1 to all, of two or more"
        )
    while len(transfers) < draws:
        draw = rng.choices(range(item_count), k=items)
        if held_out := sorted(set(range(item_count)) - set(draw)):
            group = choose(select_items(profiles, draw)).group
            (judged,) = select_items([p for p in profiles if p.group == group], held_out)
            transfers.append(ResampledChoice(group, judged.relative_loss))
    return transfers


def best_of_size(layers: int) -> Chooser:
    """Chooses the group of exactly ``layers`` layers with the least loss; of equals the lowest."""

    def choose(profiles: Sequence[Profiled]) -> Profiled:
        return min((p for p in profiles if len(p.group) == layers), key=lambda p: (p.relative_loss, p.group.lo))

    return choose


def select_items(profiles: Sequence[Profiled], items: Sequence[int]) -> list[Profiled]:
    """The profiles as if only ``items`` (indices, one may come twice) had been asked."""
    return [Profiled(p.group, tuple(p.own[i] for i in items), tuple(p.mixed[i] for i in items)) for p in profiles]


def random_halves(items: int, seed: int) -> tuple[list[int], list[int]]:
    """The indices of ``items`` items in two random halves, rising. Raises RequestError for fewer than two."""
    if items < 2:
        raise RequestError(f"{items} items cannot be halved; profile at least two")
    order = random.Random(seed).sample(range(items), items)
    return sorted(order[: items // 2]), sorted(order[items // 2 :])
