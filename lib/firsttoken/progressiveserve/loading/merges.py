"""Weights that serve, and what is merged into them in place as it arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from firsttoken.progressiveserve.checkpoint.manifest import PartFile
from firsttoken.progressiveserve.checkpoint.part_formats import WeightMerger, format_of

Merge = Callable[[], None]


class Merging(NamedTuple):
    """``bytes`` of weights that were changed between two steps, in ``seconds``."""

    bytes: int
    seconds: float


class Merges:
    """What has been merged into the weights of one model.

    Merges are in place, so the model is never there twice: every view of it has the better weights as they come.
    ``between`` calls a merge when nobody computes with the weights: at once, or where an engine runs between two of its
    steps. ``spent`` is what each of these calls took (on a GPU, until it was launched).
    """

    def __init__(self) -> None:
        self.between: Callable[[Merge], Any] = lambda merge: merge()
        self.spent: list[Merging] = []
        self._mergers: dict[str, WeightMerger] = {}  # by format: a load that is tried again merges nothing twice

    def place(self, part: PartFile, file: memoryview, parameters: Callable[[str], nn.Parameter]) -> None:
        """Merge ``part``, whose ``file`` is there, into ``parameters``. Raises ModelError."""
        if part.format not in self._mergers:
            self._mergers[part.format] = format_of(part.format).merger(self.run)
        self._mergers[part.format].place(part, file, parameters)

    def run(self, merges: Sequence[Merge], size: int) -> None:
        """Let ``merges``, which change ``size`` bytes of weights, be called together between two steps."""
        self.between(partial(self._together, merges, size))

    def _together(self, merges: Sequence[Merge], size: int) -> None:
        begin = time.perf_counter()
        for merge in merges:
            merge()
        self.spent.append(Merging(size, time.perf_counter() - begin))
