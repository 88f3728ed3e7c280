"""A token budget that holds an objective: as many prompt tokens as fit into the time between two tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from firsttoken.engine.schedulers.pace import Pace
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.work import Work


class AdaptiveBudget(Sarathi):
    """The step may take ``tbt_s``, and ``stretch`` times what its decodes alone would, by what the last steps took;
    ``prefill_tokens`` bound it where nobody decodes.

    No budget is chosen by hand. ``token_budget`` holds until enough steps were seen. A prompt always goes on by a
    block, so that decodes alone cannot starve it.
    """

    name: ClassVar[str] = "adaptive_budget"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.pace = Pace()

    def budget(self, decodes: Sequence[Work]) -> int:
        return len(decodes) + self.room(decodes, self.bounds.tbt_s)

    def room(self, decodes: Sequence[Work], seconds: float) -> int:
        """Prompt tokens beside ``decodes`` in a step of ``seconds``."""
        most = max(self.bounds.prefill_tokens, self.bounds.token_budget)
        if not decodes:
            return most
        seconds = min(seconds, self.bounds.stretch * self.pace.decode_s([work.start for work in decodes]))
        begun = next((request.cached for request in self.running if not request.decoding), 0)
        found = self.pace.most_tokens([work.start for work in decodes], begun, seconds, most)
        return self.bounds.token_budget - len(decodes) if found is None else max(found, self.block_tokens)

    def completed(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        self.pace.observe(prefills, contexts, seconds)
