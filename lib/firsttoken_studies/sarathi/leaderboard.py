"""The record table: capacity under the strict objective by scheduler, and the rule by which a newcomer enters it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from firsttoken.sarathi.capacity import STRICT
from firsttoken.sarathi.policy import scheduler_labels
from firsttoken.study.stats import bootstrap, ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.record.markdown import table
from firsttoken_studies.record.results import Result, distinct
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import numpy as np
    import pandas

EXPERIMENT = "serving_capacity"
DRAWS = 5  # of requests, that a capacity must stand on
BASE = "prefill_first"


@dataclass(frozen=True)
class RankedScheduler:
    """A scheduler as profiles name it, and entries of a summary: its capacity, and over ``BASE``'s (None: its own)."""

    scheduler: str
    capacity: Mapping[str, Any]
    over_base: Mapping[str, Any] | None


def add_capacities(summary: Summary, frame: pandas.DataFrame, **labels: str) -> dict[str, np.ndarray]:
    """Add the capacity of each scheduler in ``frame`` by draw, and over that of ``BASE`` on the same draws.

    Returns the capacities by scheduler.
    """
    rates = {
        name: scheduler_rows.requests_per_s.to_numpy()
        for name, scheduler_rows in frame.groupby("scheduler", sort=False)
    }
    for name, scheduler_rows in rates.items():
        labels_of_scheduler = scheduler_labels(name) | labels
        summary.add("capacity_requests_per_s", bootstrap(scheduler_rows).summary("requests/s"), **labels_of_scheduler)
        if BASE in rates and name != BASE and rates[BASE].min() > 0:
            summary.add(
                "capacity_x", ratio_of_means(scheduler_rows, rates[BASE]).summary("x"), **labels_of_scheduler, than=BASE
            )
    return rates


def ranking(result: Result) -> list[RankedScheduler]:
    """The schedulers of a result of ``EXPERIMENT``, the highest capacity first: that one holds the record."""
    places = []
    for name in distinct(result.rows, "scheduler", objective=STRICT):
        labels = scheduler_labels(name) | {"objective": STRICT}
        capacity = result.summary.of("capacity_requests_per_s", **labels)
        places.append(RankedScheduler(name, capacity, result.summary.get("capacity_x", **labels, than=BASE)))
    return sorted(places, key=lambda entry: entry.capacity["value"], reverse=True)


def enters(newcomer: Mapping[str, Any], holder: Mapping[str, Any]) -> bool:
    """Return whether a capacity (entry of a summary) takes the record: its interval clears the holder's.

    The capacity must stand on ``DRAWS`` draws or more: of fewer an interval is a range, and clears nothing.
    """
    return newcomer["n"] >= DRAWS and newcomer["low"] > holder["high"]


def record_table(result: Result) -> str:
    """``ranking`` as a table of markdown, and what it stands on."""
    places = ranking(result)
    clears = [enters(upper.capacity, after.capacity) for upper, after in pairwise(places)]
    capacity, hardware = result.parameters["capacity"], result.parameters["hardware"]
    columns = {
        "scheduler": [entry.scheduler for entry in places],
        "capacity, requests/s": [interval(entry.capacity, 2) for entry in places],
        f"over {BASE}": [interval(entry.over_base, 2) for entry in places],
        "clears the next": [*("yes" if clear else "no" for clear in clears), ""],
    }
    (tbt_s,) = distinct(result.rows, "tbt_s", objective=STRICT)
    return (
        f"{table(columns)}\n\n"
        f"P99 between two tokens at most {1e3 * tbt_s:.0f} ms, median delay to the first step at most 2 s; "
        f"{capacity['requests']} requests a draw with the lengths of {capacity['lengths']}, {capacity['seeds']} draws; "
        f"{result.provenance['kind']} of {hardware['costs']}, {16 * hardware['blocks']:,} tokens of KV cache, at most "
        f"{capacity['batch']} requests at once. Recorded under profile {result.profile} on {result.started[:10]}."
    )
