"""The three stages of a progressive start: A is served first, then B, then C come in (ProgressiveServe, 2.5.3).

Indices are 0-based everywhere. The report counts from 1: its 21-28 of 32 are 20-27 here, while a script of its
authors uses 21-28 from 0 (errata I8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firsttoken.study.errors import StageError

STAGES = (1, 2, 3)


@dataclass(frozen=True)
class StagePlan:
    """The layers that wait: ``b`` until stage 2, ``c`` until stage 3. All others, group A, are served from stage 1."""

    depth: int
    b: tuple[int, ...]
    c: tuple[int, ...]

    def __post_init__(self) -> None:
        block = self.block
        if not block:
            raise StageError("the removed block is empty: choose a block size of 1 or more")
        if len(block) >= self.depth:
            raise StageError(f"the removed block holds {len(block)} of {self.depth} layers: at least one must stay")
        if len(set(block)) != len(block) or min(block) < 0 or max(block) >= self.depth:
            raise StageError(f"block {list(block)} does not fit a model of {self.depth} layers, 0-{self.depth - 1}")

    @classmethod
    def from_block(cls, depth: int, block: Sequence[int]) -> StagePlan:
        """Split ``block`` (0-based layer list) into B, its lower half, and C; of an odd block B gets one more."""
        half = (len(block) + 1) // 2
        return cls(depth, tuple(block[:half]), tuple(block[half:]))

    @property
    def block(self) -> tuple[int, ...]:
        """All layers that wait, B then C."""
        return self.b + self.c

    @property
    def a(self) -> tuple[int, ...]:
        """The layers that are kept, group A."""
        return tuple(i for i in range(self.depth) if i not in set(self.block))

    def missing(self, stage: int) -> tuple[int, ...]:
        """The layers that are still passed in ``stage`` (1, 2 or 3)."""
        if stage not in STAGES:
            raise StageError(f"stage {stage} does not exist: choose one of {', '.join(map(str, STAGES))}")
        return {1: self.block, 2: self.c, 3: ()}[stage]

    def present(self, stage: int) -> tuple[int, ...]:
        """The layers that compute in ``stage``, which are those that its adapter may touch."""
        gone = set(self.missing(stage))
        return tuple(i for i in range(self.depth) if i not in gone)


REPORT_PLAN = StagePlan.from_block(32, range(20, 28))
"""Llama-2-7B as the report prunes it: A 1-20 and 29-32, B 21-24, C 25-28 counted from 1 (3.3.1)."""
