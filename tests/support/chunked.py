"""Sarathi's batches under a budget of a few tokens, so that every prompt of a test goes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.sarathi import Sarathi


class Chunked(Sarathi):
    """``pieces`` tokens a step, or as many as there are decodes and one more: a prompt always goes on."""

    name: ClassVar[str] = "chunked"
    pieces: ClassVar[int] = 5

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        return max(self.pieces, len(decodes) + 1)
