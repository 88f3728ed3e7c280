"""Sarathi-Serve's two halves alone (Table 4): chunks that never share a batch, and batches that never cut."""

from __future__ import annotations

from typing import ClassVar

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.scheduler import Scheduler


class ChunkedOnly(Scheduler):
    """Chunks and decodes take turns, each in batches of their own: a decode waits for one chunk, not for a prompt."""

    name: ClassVar[str] = "chunked_only"
    steady: ClassVar[bool] = True
    _chunked = False  # in the last step

    def schedule(self) -> list[ScheduledChunk]:
        chunks = [] if self._chunked else self._chunk()
        self._chunked = bool(chunks)
        if chunks:
            return chunks
        chunks, calm = self.ready()
        return chunks if chunks or not calm else self._chunk()

    def _chunk(self) -> list[ScheduledChunk]:
        return self.chunks(self.config.token_budget, admit=not self.swapped)


class HybridOnly(Scheduler):
    """Decodes and whole prompts share a batch, however long a prompt is."""

    name: ClassVar[str] = "hybrid_only"
    steady: ClassVar[bool] = True

    def schedule(self) -> list[ScheduledChunk]:
        chunks, calm = self.ready()
        return chunks + self.prefills(admit=calm and not self.swapped)
