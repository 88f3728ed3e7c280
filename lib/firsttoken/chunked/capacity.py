"""Serving capacity: the most requests a second that a scheduler serves within an objective (Sarathi-Serve, 5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.engine.request import Request
from firsttoken.engine.workload.items import Item


@dataclass(frozen=True)
class Objective:
    """P99 of the time between two tokens of a request, and the median delay until its first step (paper: 2 s)."""

    tbt_s: float
    delay_s: float = 2.0


@dataclass(frozen=True)
class Served:
    """What the clients of one run saw; ``begun_s`` is when a request was first in a step."""

    tbt_p99_s: float
    tbt_max_s: float
    ttft_p50_s: float
    delay_p50_s: float
    requests_per_s: float

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Served:
        """The figures of requests that are over."""
        gaps = np.concatenate([np.diff(request.times_s) for request in requests])
        ends = max(request.times_s[-1] for request in requests)
        return cls(
            tbt_p99_s=float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
            tbt_max_s=float(gaps.max()) if len(gaps) else 0.0,
            ttft_p50_s=float(np.median([request.ttft_s for request in requests])),
            delay_p50_s=float(np.median([request.begun_s - request.arrival_s for request in requests])),
            requests_per_s=len(requests) / (ends - min(request.arrival_s for request in requests)),
        )

    def within(self, objective: Objective) -> bool:
        """Whether both bounds hold."""
        return self.tbt_p99_s <= objective.tbt_s and self.delay_p50_s <= objective.delay_s


def capacity(serve: Callable[[float], Served], objective: Objective, *, start: float, share: float = 0.02) -> float:
    """The highest rate [requests/s] at which ``serve(rate)`` is within ``objective``, to a relative ``share``.

    Doubles or halves from ``start`` until the objective lies between two rates, then halves the distance (the paper's
    search has seven to eight trials). 0 where not even a thousandth of ``start`` is served in time.
    """
    low, high = 0.0, math.inf
    rate = start
    while high == math.inf or high - low > share * high:
        if serve(rate).within(objective):
            low = rate
        else:
            high = rate
        if high <= start / 1000:
            return 0.0
        rate = 2 * rate if high == math.inf else (low + high) / 2 if low else high / 2
    return low


def at_rate(items: Sequence[Item], rate: float) -> tuple[Item, ...]:
    """``items`` of a trace of one request a second on average, arriving ``rate`` times as fast."""
    return tuple(Item(item.arrival_s / rate, item.prompt_tokens, item.output_tokens, item.prompt) for item in items)
