"""The requests of a workload: how long prompts and answers are, and when each comes: at once, or one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.engine.request import Request, Sampling
from firsttoken.study.errors import RequestError

if TYPE_CHECKING:
    from firsttoken.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Item:
    """A request; a workload is a tuple of them, sorted by ``arrival_s``.

    ``prompt`` holds the token ids where the text is real, and nothing where only its length is known. The answer is
    as long as ``output_tokens`` says, whatever the model would have said. Raises RequestError for a time that is
    negative or not finite, an empty prompt or answer, and ids whose number is not ``prompt_tokens``.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < math.inf:
            raise RequestError(f"a request cannot arrive at {self.arrival_s} s; give a time from 0 on")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise RequestError(
                f"a request of {self.prompt_tokens} prompt and {self.output_tokens} output tokens: give both 1 or more"
            )
        if self.prompt and len(self.prompt) != self.prompt_tokens:
            raise RequestError(
                f"a request says {self.prompt_tokens} prompt tokens and brings {len(self.prompt)}; make them agree"
            )

    @property
    def total_tokens(self) -> int:
        """Prompt and answer: the length by which the report calls a request short or long (4.1)."""
        return self.prompt_tokens + self.output_tokens


def with_ids(items: Sequence[Item], vocabulary: int, seed: int = 0) -> tuple[Item, ...]:
    """The items, those without token ids with random ones below ``vocabulary``: for live runs on random weights.

    Ids that an item has are kept. Raises RequestError for an empty vocabulary, and for a kept id that is not in it.
    """
    if vocabulary < 1:
        raise RequestError(f"no token ids can be drawn from a vocabulary of {vocabulary}; give the model's")
    rng = np.random.default_rng(seed)
    filled = []
    for item in items:
        if not item.prompt:
            item = replace(item, prompt=tuple(rng.integers(vocabulary, size=item.prompt_tokens).tolist()))
        elif max(item.prompt) >= vocabulary:
            raise RequestError(
                f"token id {max(item.prompt)} is not in a vocabulary of {vocabulary}; use the model's own tokenizer"
            )
        filled.append(item)
    return tuple(filled)


@dataclass(frozen=True)
class Arrivals:
    """The rate at which requests arrive, by a Poisson process; inf is all at once, as the report has it (4.1).

    With a ``burstiness`` other than 1 the gaps have a gamma distribution of that shape, as in vLLM's benchmark: the
    lower it is, the more requests come together. Raises RequestError for a rate or a burstiness that is not above 0.
    """

    rate_per_s: float = math.inf
    seed: int = 0
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate_per_s > 0:
            raise RequestError(f"arrivals: rate_per_s must be above 0 (inf for all at once), not {self.rate_per_s}")
        if not 0 < self.burstiness < math.inf:
            raise RequestError(f"arrivals: burstiness must be above 0 (1 is a Poisson process), not {self.burstiness}")

    def times_s(self, count: int) -> np.ndarray:
        """The arrival times of ``count`` requests [count], ascending, the first at 0."""
        times = np.zeros(count)
        if self.rate_per_s < math.inf and count > 1:
            rng, shape = np.random.default_rng(self.seed), self.burstiness
            if shape == 1:
                gaps = rng.exponential(1 / self.rate_per_s, size=count - 1)
            else:
                gaps = rng.gamma(shape, 1 / (shape * self.rate_per_s), size=count - 1)
            times[1:] = np.cumsum(gaps)
        return times


def with_arrivals(items: Sequence[Item], arrivals: Arrivals) -> tuple[Item, ...]:
    """The items in their order, arriving as ``arrivals`` says; the times they had are lost."""
    times = arrivals.times_s(len(items)).tolist()
    return tuple(replace(item, arrival_s=time) for item, time in zip(items, times, strict=True))


def serve_items(engine: Engine, items: Sequence[Item]) -> list[Request]:
    """Run a workload to the end; every answer is greedy and as long as its item says."""
    return engine.serve([(item.prompt, Sampling(item.output_tokens), item.arrival_s) for item in items])
