"""Serving capacity: the most requests a second that a scheduler serves within an objective (Sarathi-Serve, 5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.engine.request import Request
from firsttoken.study.errors import ProfileError

STRICT, RELAXED = "strict", "relaxed"
TIMES = {STRICT: 5, RELAXED: 25}  # a decode iteration (Table 3)
SLOWEST, FASTEST = 100, 1000  # times the rate at which a search begins
SHARE = 0.02  # of the highest rate, to which it is found


@dataclass(frozen=True)
class Objective:
    """Limits on the P99 of the time between two tokens of a request, and on the median delay to its first
    step."""

    tbt_s: float
    delay_s: float = 2.0  # the paper's


@dataclass(frozen=True)
class ClientTimes:
    """The times between tokens, to the first token and to the first step that the clients of one run saw, in
    seconds; and the share of the run in which requests came, near 1 for a rate that lasts and small for a burst."""

    tbt_p99_s: float
    tbt_max_s: float
    ttft_p50_s: float
    delay_p50_s: float
    arriving_share: float = 1.0

    @classmethod
    def of(cls, requests: Sequence[Request]) -> ClientTimes:
        """Compute the times from requests that are over; an answer of one token has no time between tokens."""
        arrivals = [request.arrival_s for request in requests]
        run_s = max(request.times_s[-1] for request in requests) - min(arrivals)
        gaps = np.concatenate([[0.0], *(np.diff(request.times_s) for request in requests)])
        return cls(
            tbt_p99_s=float(np.percentile(gaps[1:], 99)) if len(gaps) > 1 else 0.0,
            tbt_max_s=float(gaps.max()),
            ttft_p50_s=float(np.median([request.ttft_s for request in requests])),
            delay_p50_s=float(np.median([request.begun_s - request.arrival_s for request in requests])),
            arriving_share=(max(arrivals) - min(arrivals)) / run_s if run_s else 1.0,
        )

    def within(self, objective: Objective) -> bool:
        """Return whether both limits of ``objective`` hold."""
        return self.tbt_p99_s <= objective.tbt_s and self.delay_p50_s <= objective.delay_s


def capacity(
    serve: Callable[[float], ClientTimes], objective: Objective, *, start: float
) -> tuple[float, ClientTimes | None]:
    """The highest rate [requests/s] at which ``serve(rate)`` is within ``objective``, to a relative ``SHARE``, and what
    was served there; (0, None) where not even a ``SLOWEST``-th of ``start`` is.

    Doubles or halves from ``start`` until the objective lies between two rates, then halves the distance (the paper's
    search has seven to eight trials). Where a scheduler fails at one rate and holds at a higher one, the first is
    taken for its capacity. A workload so small that it is in time even ``FASTEST`` times as fast says nothing.
    """
    low, high, best = 0.0, math.inf, None
    rate = start
    while high == math.inf or high - low > SHARE * high:
        served = serve(rate)
        if served.within(objective):
            low, best = rate, served
        else:
            high = rate
        if high < start / SLOWEST:
            return 0.0, None
        if low > start * FASTEST:
            raise ProfileError("even all requests at once are within the objective; ask for more of them")
        rate = 2 * rate if high == math.inf else (low + high) / 2
    return low, best
