"""Costs of requests whose prefill was timed by itself, whatever was done to make it shorter; decode steps as fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.engine.costs.fitted import StepSample, relative_fit
from firsttoken.engine.costs.model import Costs
from firsttoken.study.errors import CorpusError


@dataclass(frozen=True)
class DecodeCosts:
    """Seconds of a step that decodes: as such, for each request in it, and for each token of their contexts."""

    step: float
    request: float
    context_token: float

    def step_s(self, contexts: Sequence[int]) -> float:
        """One token for each request; ``contexts`` are their cached tokens. Nothing for none."""
        return self.step + self.request * len(contexts) + self.context_token * sum(contexts) if contexts else 0.0


def fit_decode(steps: Sequence[StepSample]) -> DecodeCosts:
    """Non-negative prices with the least squared relative error. Raises CorpusError for fewer than 3 steps."""
    if len(steps) < 3:
        raise CorpusError(f"decode costs: {len(steps)} steps seen; a fit needs at least 3")
    parts = [[1.0, len(step.contexts), sum(step.contexts)] for step in steps]
    return DecodeCosts(*relative_fit(parts, [step.seconds for step in steps]).tolist())


@dataclass(frozen=True)
class TimedCosts(Costs):
    """A prefill of ``lengths`` [k] tokens, ascending, takes ``prefill`` [k] seconds; decoding as ``decode`` says.

    Between the lengths the seconds *a token* are a straight line, as attention's share of them grows with the length;
    outside they stay those of the nearest. Where ``loaded_token`` is given, so many seconds a token of the context are
    on the link before the prefill can end, beside the computation: the longer of the two counts. A swap takes
    ``moved_token`` seconds a token each way.
    """

    lengths: tuple[int, ...]
    prefill: tuple[float, ...]
    decode: DecodeCosts
    loaded_token: float = 0.0
    moved_token: float = 0.0

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.prefill) or list(self.lengths) != sorted({*self.lengths}) or not self.lengths:
            raise CorpusError(f"a prefill must be timed once for each length, ascending, not for {list(self.lengths)}")

    def prefill_s(self, tokens: int) -> float:
        """A prompt of ``tokens`` tokens by itself."""
        a_token = np.divide(self.prefill, self.lengths)
        return tokens * max(float(np.interp(tokens, self.lengths, a_token)), self.loaded_token)

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        prompts = sum(self.prefill_s(cached + new) - self.prefill_s(cached) for cached, new in prefills)
        return prompts + self.decode.step_s(contexts)

    def swap_out_s(self, tokens: int) -> float:
        return self.moved_token * tokens

    def swap_in_s(self, tokens: int) -> float:
        return self.moved_token * tokens

    def request_s(self, tokens: int, new_tokens: int) -> float:
        """A request alone: its prefill, and a step for each of ``new_tokens`` after the first."""
        steps = (self.decode.step_s([tokens + token]) for token in range(new_tokens - 1))
        return self.prefill_s(tokens) + sum(steps)
