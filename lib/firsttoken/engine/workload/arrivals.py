"""When requests arrive: all at once, as a Poisson process, or in bursts (gaps that are Gamma distributed)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from firsttoken.engine.workload.workload_items import Item
from firsttoken.study.errors import RequestError


@dataclass(frozen=True)
class Arrivals:
    """Requests a second, and how unevenly they come.

    ``rate_per_s`` inf is all at once, as the report has it (4.1). ``cv`` is the standard deviation of the gaps between
    arrivals over their mean: 1 is a Poisson process, more comes in bursts, less is more even. Raises RequestError for
    a rate or a cv that is not above 0, and for a cv where there are no gaps.
    """

    rate_per_s: float = math.inf
    cv: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate_per_s > 0:
            raise RequestError(f"arrivals: rate_per_s must be above 0 (inf for all at once), not {self.rate_per_s}")
        if not 0 < self.cv < math.inf:
            raise RequestError(f"arrivals: cv must be above 0 and finite (1 for Poisson), not {self.cv}")
        if self.rate_per_s == math.inf and self.cv != 1:
            raise RequestError(f"arrivals: requests that come at once have no gaps for cv {self.cv}; give a rate_per_s")

    def times_s(self, count: int) -> np.ndarray:
        """The arrival times of ``count`` requests [count], ascending, the first at 0."""
        times = np.zeros(count)
        if self.rate_per_s < math.inf and count > 1:
            # a Gamma of this shape and scale has mean 1 / rate and standard deviation cv / rate
            rng = np.random.default_rng(self.seed)
            gaps = rng.gamma(1 / self.cv**2, self.cv**2 / self.rate_per_s, size=count - 1)
            times[1:] = np.cumsum(gaps)
        return times


def with_arrivals(items: Sequence[Item], arrivals: Arrivals) -> tuple[Item, ...]:
    """The items in their order, arriving as ``arrivals`` says; the times they had are lost."""
    times = arrivals.times_s(len(items)).tolist()
    return tuple(replace(item, arrival_s=time) for item, time in zip(items, times, strict=True))
