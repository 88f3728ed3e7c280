"""Plans that mix bits and layers, each in one line: "bits, 11:19 later, ends 8 bits" (standard library only)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of

UNCUT = "uncut"
SPELLED = "SPLIT[, FIRST:END later[ as SPLIT]][, ends SPLIT]"
_LATER = re.compile(r"(\d{1,5}):(\d{1,5}) later(?: as (.+))?")


@dataclass(frozen=True)
class LaterLayers:
    """Layers ``first`` to ``end`` - 1 (0-based), which a stage of their own brings; ``split`` is "" for the others'."""

    first: int
    end: int
    split: str = ""


@dataclass(frozen=True)
class PlanSpec:
    """Which bits come first, and which layers later.

    Layers are cut by ``split``, the embedding and the head by ``ends`` ("": alike). Each range of ``later`` waits for a
    stage of its own, in the order in which they are named, and may be cut by another split. UNCUT is in one piece.
    Raises StageError for a split that does not exist, a range without layers, and ranges that overlap.
    """

    split: str
    later: tuple[LaterLayers, ...] = ()
    ends: str = ""

    def __post_init__(self) -> None:
        for name in (self.split, *({self.ends, *(one.split for one in self.later)} - {"", UNCUT})):
            if name not in SPLITS:
                raise StageError(f"no split of weights is called {name!r}: choose one of {', '.join(SPLITS)}")
        for one in self.later:
            if one.first >= one.end:
                raise StageError(f"{one.first}:{one.end} holds no layers: name the first, and the one after the last")
        for one, other in pairwise(sorted(self.later, key=lambda one: one.first)):
            if other.first < one.end:
                raise StageError(
                    f"the layers {one.first}:{one.end} and {other.first}:{other.end} overlap: name each layer once"
                )

    @classmethod
    def parse(cls, text: str) -> PlanSpec:
        """The plan that ``text`` names, as SPELLED. Raises StageError, also for a part that is none."""
        split, *parts = (part.strip() for part in text.split(","))
        later: list[LaterLayers] = []
        ends = ""
        for part in parts:
            if found := _LATER.fullmatch(part):
                later.append(LaterLayers(int(found[1]), int(found[2]), found[3] or ""))
            elif part.startswith("ends ") and not ends:
                ends = part.removeprefix("ends ").strip()
            else:
                raise StageError(f"{part!r} is no part of a plan: write {SPELLED}")
        return cls(split, tuple(later), ends)

    def __str__(self) -> str:
        later = (f"{one.first}:{one.end} later" + (f" as {one.split}" if one.split else "") for one in self.later)
        return ", ".join((self.split, *later, *([f"ends {self.ends}"] if self.ends else ())))

    def split_of(self, layer: int | None) -> str:
        """What the matrices of ``layer`` are cut by; None is what is of no layer."""
        if layer is None:
            return self.ends or self.split
        return next((one.split for one in self.later if one.first <= layer < one.end), "") or self.split

    @property
    def waiting(self) -> frozenset[int]:
        """The layers that the first stage lacks."""
        return frozenset(layer for one in self.later for layer in range(one.first, one.end))

    @property
    def exact(self) -> bool:
        """Whether the first stage is the whole model, bit by bit."""
        return not self.later and planes_of(self.split) == planes_of(self.split_of(None)) == 1

    def groups(self, depth: int) -> list[Sequence[int]]:
        """The layers of a model of ``depth`` that each stage begins, the first stage's first.

        Raises StageError for a range that the model does not have, and when nothing is left for the first stage.
        """
        if odd := next((one for one in self.later if one.end > depth), None):
            raise StageError(f"the plan names the layers {odd.first}:{odd.end}, and the model has 0:{depth}")
        if not (first := [layer for layer in range(depth) if layer not in self.waiting]):
            raise StageError(f"the plan leaves all {depth} layers for later: the first stage needs at least one")
        return [first, *(range(one.first, one.end) for one in self.later)]
