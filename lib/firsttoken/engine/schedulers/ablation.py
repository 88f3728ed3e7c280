"""Sarathi-Serve's two halves alone (Table 4): chunks that never share a batch, and batches that never cut."""

from __future__ import annotations

from typing import ClassVar

from firsttoken.engine.request import Work
from firsttoken.engine.schedulers.base import Scheduler


class ChunkedOnly(Scheduler):
    """Chunks and decodes take turns, each in batches of their own: a decode waits for one chunk, not for a prompt."""

    name: ClassVar[str] = "chunked_only"
    _decoded = True  # the last step decoded

    def schedule(self) -> list[Work]:
        works = self.chunks(self.bounds.token_budget, admit=not self.swapped) if self._decoded else []
        self._decoded = not works
        return works or self.ready()[0]


class HybridOnly(Scheduler):
    """Decodes and whole prompts share a batch, however long a prompt is."""

    name: ClassVar[str] = "hybrid_only"

    def schedule(self) -> list[Work]:
        works, calm = self.ready()
        return works + self.prefills() if calm and not self.swapped else works
