"""Replicas that start together over one shared link, and the router before them; all of it is simulated.

Each replica runs the engine's own scheduler over measured costs, and grows by stages as a live one does.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig, fast_forward
from firsttoken.engine.request import Kind, LayerRecompute, Request, Sampling, ScheduledChunk
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item
from firsttoken.progressiveserve.stages import STAGES

FAIR, FIRST_STAGES, IN_TURN = "fair", "first stages first", "in turn"

# The link: whoever loads shares it.


class Loads(NamedTuple):
    """``ready_s`` [replicas][parts]: when each part is there; ``flows`` (from, to, bytes a second [parts]), whose sum
    over the parts is what the link carries."""

    ready_s: list[list[float]]
    flows: list[tuple[float, float, list[float]]]

    def bytes_by(self, moment_s: float) -> list[float]:
        """Bytes of each part that came by then, over all replicas."""
        came = [[max(0.0, min(end, moment_s) - begin) * rate for rate in rates] for begin, end, rates in self.flows]
        return [float(sum(part)) for part in zip(*came, strict=True)]


def shared_link(
    starts_s: Sequence[float], sizes: Sequence[float], bytes_s: float, most: float, order: str = FAIR
) -> Loads:
    """Load parts of ``sizes`` bytes one after the other to each replica, from its ``starts_s`` on.

    ``bytes_s`` are shared max-min: all get the same, but none more than ``most``. Under another ``order`` those whose
    turn is first share alone, and the next have what these leave.
    """
    turns = {FAIR: lambda who: 0, FIRST_STAGES: lambda who: part[who], IN_TURN: lambda who: (part[who], who)}
    part, remaining = [0] * len(starts_s), [float(sizes[0])] * len(starts_s)
    ready_s: list[list[float]] = [[] for _ in starts_s]
    flows, now = [], min(starts_s)
    while any(part_index < len(sizes) for part_index in part):
        loading = [who for who, part_index in enumerate(part) if part_index < len(sizes) and starts_s[who] <= now]
        rates, free = dict.fromkeys(loading, 0.0), bytes_s
        for _, turn in groupby(sorted(loading, key=turns[order]), turns[order]):
            sharing = list(turn)
            rates |= dict.fromkeys(sharing, min(most, free / len(sharing)))
            free -= len(sharing) * rates[sharing[0]]
        begins = [part_index for part_index in starts_s if part_index > now]
        end_times_s = [remaining[who] / rate for who, rate in rates.items() if rate > 1e-9 * bytes_s]
        end = min([now + min(end_times_s, default=math.inf), *begins])
        flows.append(
            (
                now,
                end,
                [sum(rates[who] for who in loading if part[who] == part_index) for part_index in range(len(sizes))],
            )
        )
        for who in loading:
            remaining[who] -= rates[who] * (end - now)
            if remaining[who] < 1:  # byte: what is left of rounding
                ready_s[who].append(end)
                part[who] += 1
                remaining[who] = float(sizes[part[who]]) if part[who] < len(sizes) else 0.0
        now = end
    return Loads(ready_s, flows)


def loads_between(starts_s: Sequence[float], sizes: Sequence[float], ready_s: list[list[float]]) -> Loads:
    """Return the loads of which ``ready_s`` alone is known: a part comes evenly after the one before it."""
    flows = []
    for begin_s, moments_s in zip(starts_s, ready_s, strict=True):
        spans = zip(pairwise([begin_s, *moments_s]), range(len(sizes)), sizes, strict=True)
        for (begin, end), index, size in spans:
            rates = [0.0] * len(sizes)
            rates[index] = size / max(end - begin, 1e-9)
            flows.append((begin, end, rates))
    return Loads(ready_s, flows)


# A replica, and the router before all of them.


class System(NamedTuple):
    """A model where it runs: bytes of its stages A, B and C [3] with their adapters, those of the whole model without,
    and the costs of a step by stage; ``blocks`` of its pool."""

    sizes: tuple[int, ...]
    whole: int
    costs: Mapping[int, Costs]
    blocks: int


class Bounds(NamedTuple):
    """Bounds of a replica: requests at once, tokens of a step, and whether open requests move to a new stage."""

    open_requests: int
    token_budget: int
    moves: bool


class ServedStage(NamedTuple):
    """One stage as the engine sees a version of a model that grows; requests compute with it."""

    stage: int
    depth: int

    @property
    def key(self) -> int:
        return self.stage

    @property
    def arrived(self) -> int:
        return self.depth

    def redo(self, request: Request, layers: range) -> LayerRecompute:
        """Compute all that is cached again: an adapter that changes with the stage touches every layer."""
        return LayerRecompute(layers, request.redo.end if request.redo else request.cached)

    def adopt(self, request: Request) -> None:
        """Do nothing: only keys and values are kept."""


class GrowingExecutor(SimulatedExecutor):
    """Charges requests of different stages one pass for each stage, as the live one computes them."""

    def __init__(self, system: System) -> None:
        super().__init__(system.costs[STAGES[-1]], system.blocks)
        self._by_stage = system.costs
        self.stage = 0  # whose requests all decoded in the last step, 0 where there was more to it

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """Charge the step, at the costs of each stage for its own requests."""
        stages = {chunk.request.version.stage for chunk in chunks}
        for stage in sorted(stages):
            self.costs_at = lambda now_s, costs=self._by_stage[stage]: costs
            super().execute([chunk for chunk in chunks if chunk.request.version.stage == stage])
        self.stage = stages.pop() if len(stages) == 1 and all(chunk.decodes for chunk in chunks) else 0
        return [0] * len(chunks)


class StartingReplica:
    """An engine that grows; ``said`` counts its tokens by the stage that made them."""

    def __init__(self, system: System, bounds: Bounds) -> None:
        self._moves, self._executor = bounds.moves, GrowingExecutor(system)
        limits = {"requests": bounds.open_requests, "token_budget": bounds.token_budget, "watermark": 0.0}
        self.engine = Engine(self._executor, EngineConfig(scheduler="sarathi", **limits))
        self.said: Counter[int] = Counter()

    @property
    def clock_s(self) -> float:
        return self._executor.now()

    def grow(self, stage: int, now_s: float) -> None:
        """Publish ``stage``: requests begin with it from the next step on, and open ones move to it if they may."""
        self._executor.wait_until(now_s)
        self.engine.publish(ServedStage(stage, STAGES[-1]), lambda old, new: range(new.depth))

    def take(self, item: Item, now_s: float) -> Request:
        """Admit the request of ``item``."""
        self._executor.wait_until(now_s)
        sampling = Sampling(item.output_tokens)
        return self.engine.submit([0] * item.prompt_tokens, sampling, item.arrival_s, moves=self._moves)

    def step(self, until_s: float) -> None:
        """Take a step, and those after it that are alike up to ``until_s`` or the end of a request."""
        for request, _ in self.engine.step():
            self.said[request.version.stage] += 1
        if self._executor.stage and self.engine.busy:
            before = self.engine.token_counts[Kind.DECODE]
            fast_forward(self.engine, until_s)
            self.said[self._executor.stage] += self.engine.token_counts[Kind.DECODE] - before


def stages_at(loads: Loads) -> list[list[tuple[float, int]]]:
    """Return for each replica the times at which it has each stage: with its last part it is whole, and without any it
    was so from the start."""
    return [
        list(zip(times, STAGES[-len(times) :], strict=True)) if times else [(0.0, STAGES[-1])]
        for times in loads.ready_s
    ]


class Burst(NamedTuple):
    """The ``requests`` of a burst in the order in which they came, and the tokens ``said`` by each stage."""

    requests: list[Request]
    said: Counter[int]


def serve(system: System, ready: Sequence[Sequence[tuple[float, int]]], items: Sequence[Item], bounds: Bounds) -> Burst:
    """Serve ``items`` by replicas to which stages come as ``ready`` says: (seconds, stage), ascending, for each.

    A request goes to the replica with the fewest open ones of those that can compute and have room, and waits before
    all of them while there is none.
    """
    replicas = [StartingReplica(system, bounds) for _ in ready]
    coming = [(ready_at, who, stage) for who, stages in enumerate(ready) for ready_at, stage in stages]
    coming += [(item.arrival_s, number, 0) for number, item in enumerate(items)]
    coming.sort(reverse=True)
    going: list[tuple[float, int]] = []
    waiting, up, served = deque[Item](), set[int](), list[Request]()
    while coming or going:
        if coming and (not going or coming[-1][0] <= going[0][0]):
            now, number, stage = coming.pop()
            if stage:
                replicas[number].grow(stage, now)
                up.add(number)
            else:
                waiting.append(items[number])
        else:
            now, number = heapq.heappop(going)
            replicas[number].step(coming[-1][0] if coming else math.inf)
            if replicas[number].engine.busy:
                heapq.heappush(going, (replicas[number].clock_s, number))
        while waiting and up and not (coming and coming[-1][0] == now):
            opened, number = min((replicas[number].engine.open_requests, number) for number in up)
            if opened >= bounds.open_requests:
                break
            served.append(replicas[number].take(waiting.popleft(), now))
            if not opened:
                heapq.heappush(going, (replicas[number].clock_s, number))
    return Burst(served, sum((replica.said for replica in replicas), Counter()))
