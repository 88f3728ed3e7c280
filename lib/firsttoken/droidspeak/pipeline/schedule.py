"""The schedules of DroidSpeak's Figure 13 (4.3), simulated exactly: one link and one processor, requests in order.

The figure's 47, 30 and 17 units are the sum of the TTFT of two requests (10 layers; A at 0 recomputes layers 4-10 and
reuses 1-3, B at 2 recomputes 1-3 and reuses 4-10, counted from 1). They come out under these assumptions, and each of
them matters:

- moving one layer's KV, computing one layer and moving an E-cache cost one unit each, although an E-cache is 0.5 to 4
  times as large as a layer's KV; a group that starts at the first layer needs none;
- "send all" moves the KV of the recomputed layers too, to throw it away;
- without the pipeline one request holds link and processor until its first token, so B's cache does not move while A
  is computed. With that overlap between requests (``overlap``) the sums are 40, 23 and 17: of the 13 units between
  "send reused" and "pipelined", 7 come from it and 6 from moving a request's KV behind its own computation;
- the pass over the tokens behind the prefix, and the latency of the link, cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from firsttoken.droidspeak.layer_group import Group
from firsttoken.study.errors import RequestError

LINK, PROCESSOR = "link", "processor"
SendingOrder: TypeAlias = "Callable[[Sequence[str], Sequence[int]], Sequence[str | int]]"


def e_cache_first(edge: Sequence[str], layers: Sequence[int]) -> list[str | int]:
    """Return in which order a cache is sent: ``edge``, which names the E-cache if there is one, then the ``layers``."""
    return [*edge, *layers]


class Schedule(StrEnum):
    """A way to send a cache: the parts sent, and whether the computation waits for all of them; the names are those of
    Figure 20."""

    RECOMPUTE = "recompute"  # nothing is sent
    SEND_ALL = "send all"
    SEND_REUSED = "send reused"
    PIPELINED = "pipelined"

    def layers(self, group: Group, depth: int) -> list[int]:
        """The layers whose KV is sent, in the order in which the pass behind the prefix needs them."""
        if self is Schedule.RECOMPUTE:
            return []
        return [layer for layer in range(depth) if self is Schedule.SEND_ALL or layer not in group]

    def sends_e_cache(self, group: Group) -> bool:
        """Return whether the E-cache at the lower edge of ``group`` is sent."""
        return self is not Schedule.RECOMPUTE and group.needs_e_cache


@dataclass(frozen=True)
class ReuseRequest:
    """A request that arrives at ``arrival`` and recomputes ``group`` of ``layers``; costs in any one unit of time.

    ``kv_units`` and ``compute_units`` are for one layer. Raises RequestError for a negative cost or a group that does
    not fit.
    """

    name: str
    arrival: float
    layers: int
    group: Group
    kv_units: float = 1
    edge_units: float = 1
    compute_units: float = 1

    def __post_init__(self) -> None:
        self.group.check(self.layers)
        for key in ("arrival", "kv_units", "edge_units", "compute_units"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise RequestError(f"request {self.name}: {key} must be 0 or more, not {getattr(self, key)}")

    @property
    def floor(self) -> float:
        """No way to reuse the other layers is faster than this: their transfer or the group's computation."""
        transfer = self.kv_units * (self.layers - len(self.group)) + self.edge_units * self.group.needs_e_cache
        return max(transfer, self.compute_units * len(self.group))


@dataclass(frozen=True)
class BusySpan:
    """``resource`` ("link" or "processor") works for ``job`` from ``start`` to ``end``.

    ``activity`` is "E", "KV 3" or, for the computation of layer 3, "3".
    """

    job: str
    resource: str
    activity: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The busy times of link and processor, and the TTFT of each request by name."""

    spans: tuple[BusySpan, ...]
    ttft: dict[str, float]

    @property
    def total(self) -> float:
        """The sum of all TTFTs: the number that Figure 13 gives."""
        return sum(self.ttft.values())


def simulate(jobs: Sequence[ReuseRequest], schedule: Schedule, *, overlap: bool = False) -> Timeline:
    """Serve ``jobs`` in the order of their arrival; integer costs give integer times.

    ``overlap``: an unpipelined schedule moves the next request's cache while this one is computed. Raises RequestError
    for no jobs, or for two of one name.
    """
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        raise RequestError("a schedule needs at least one request, and each its own name")
    spans: list[BusySpan] = []
    free: dict[str, float] = {LINK: 0, PROCESSOR: 0}
    ttft = {}

    def occupy(job: ReuseRequest, resource: str, activity: str, units: float, earliest: float) -> float:
        start = max(free[resource], earliest)
        free[resource] = start + units
        spans.append(BusySpan(job.name, resource, activity, start, start + units))
        return start + units

    for job in sorted(jobs, key=lambda job: job.arrival):
        if schedule is not Schedule.PIPELINED and not overlap:
            free = dict.fromkeys(free, max(free.values()))
        edge = sent = job.arrival
        if schedule.sends_e_cache(job.group):
            edge = sent = occupy(job, LINK, "E", job.edge_units, job.arrival)
        for layer in schedule.layers(job.group, job.layers):
            sent = occupy(job, LINK, f"KV {layer}", job.kv_units, job.arrival)
        done = edge if schedule is Schedule.PIPELINED else sent
        for layer in range(job.layers) if schedule is Schedule.RECOMPUTE else job.group.layers:
            done = occupy(job, PROCESSOR, str(layer), job.compute_units, done)
        ttft[job.name] = max(sent, done) - job.arrival
    return Timeline(tuple(spans), ttft)
