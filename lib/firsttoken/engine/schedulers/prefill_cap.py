"""A smaller budget while prompts compete with decodes (P-PAS, Sämann, arXiv 2608.15171)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.sarathi import Sarathi


class PrefillCap(Sarathi):
    """``prefill_tokens`` a step, or ``token_budget`` while at least two prompts are unfinished and somebody decodes.

    The two budgets are chosen by hand, as there.
    """

    name: ClassVar[str] = "prefill_cap"

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
        unfinished = len(self.waiting) + sum(not request.decoding for request in self.running)
        pressed = unfinished >= 2 and bool(decodes)
        return self.config.token_budget if pressed else max(self.config.prefill_tokens, self.config.token_budget)
