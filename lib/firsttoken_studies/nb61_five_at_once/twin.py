"""The simulated twin of a window: engine, schedulers, pool, preemption and borrowing are the live ones, and time passes
by a cost model. Tokens mean nothing, and links are as fast as they are said to be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import Any

import torch
from torch import Tensor

from firsttoken.cps.policies import make_policy
from firsttoken.droidspeak.layer_group import Group
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine
from firsttoken.engine.request import LayerRecompute, Request, ScheduledChunk, shapes
from firsttoken.engine.simulated import TOKEN, SimulatedExecutor
from firsttoken_extras.layer_borrowing.prefix_offer import GroupRule, PrefixOffer, group_at
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica
from firsttoken_studies.nb61_five_at_once.study import Asked, FiveConfig
from firsttoken_studies.nb61_five_at_once.trial import (
    BLOCK_TOKENS,
    BORROWING,
    CHUNKS,
    CROSS_POINT,
    FOREIGN,
    STAGES,
    ColdReplica,
    GrowingReplica,
    engine_config,
    seen,
    serve,
)

Wanted = Callable[[Mapping[str, Any]], PrefixOffer | None]


@dataclass(frozen=True)
class TwinModel:
    """A model on a processor, and on its way to it.

    ``costs`` are those of a whole step, of which the head takes ``head_s`` seconds for a number of rows, and every
    layer takes as long as the others. ``stages`` are (bytes, layers that compute from then on), ``parts`` the bytes of
    the ends and of each layer behind them. A token has ``kv_bytes`` of keys and values in a layer and ``state_bytes``
    of hidden states between two. A hop to the neighbour and back takes ``hop_s`` and the time to send its hidden states
    at ``hop_gbit_per_s`` (0: no time); the neighbour computes as fast as the replica.
    """

    costs: Costs
    head_s: Callable[[int], float]
    stages: tuple[tuple[int, frozenset[int]], ...]
    parts: tuple[int, ...]
    kv_bytes: int
    state_bytes: int
    hop_s: float
    hop_gbit_per_s: float = 0.0

    @property
    def depth(self) -> int:
        return len(self.parts) - 1


class TwinVersion:
    """The model as it is at one moment: the ``layers`` that compute, those from ``first_borrowed`` on borrowed."""

    stage = 0
    _keys = count()

    def __init__(self, depth: int, layers: frozenset[int], first_borrowed: int) -> None:
        self.depth = self.arrived = depth
        self.layers, self.here = layers, first_borrowed
        self.key = next(self._keys)

    def redo(self, request: Request, layers: range) -> LayerRecompute:
        """Return the layers and tokens that ``request`` computes again, as ``ModelVersion.redo`` does where all hidden
        states were kept."""
        if request.redo is not None:
            return LayerRecompute(range(self.depth), request.redo.end)
        return LayerRecompute(layers, request.cached)

    def adopt(self, request: Request) -> None:
        """Do nothing: a simulated request keeps no hidden states."""


class TwinExecutor(SimulatedExecutor):
    """Charges a step layer by layer: each takes what its share of the model takes with the chunks that go through it,
    those that are computed again included, and the head what it takes for those that say a token."""

    def __init__(self, model: TwinModel, blocks: int, host_blocks: int = 0) -> None:
        super().__init__(model.costs, blocks, block_tokens=BLOCK_TOKENS, host_blocks=host_blocks)
        self.model = model

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        self._now += self.seconds(chunks)
        return [TOKEN] * len(chunks)

    def seconds(self, chunks: Sequence[ScheduledChunk]) -> float:
        """Return the seconds of the step of ``chunks`` through the layers of ``version``."""
        model, version = self.model, self.version
        redone = [range(model.depth) if chunk.redo is None else chunk.redo.layers for chunk in chunks]
        edges = sorted(
            {
                0,
                model.depth,
                version.here,
                *(edge for redo_layers in redone for edge in (redo_layers.start, redo_layers.stop)),
            }
        )
        seconds, sent = model.head_s(sum(chunk.redo is None for chunk in chunks)), 0
        seconds_by_set: dict[tuple[bool, ...], float] = {}
        for low, high in pairwise(edges):
            membership = tuple(low in layers for layers in redone)
            passing = [chunk for chunk, through in zip(chunks, membership, strict=True) if through]
            if not passing or not (computing := sum(layer in version.layers for layer in range(low, high))):
                continue
            if membership not in seconds_by_set:
                prefills, contexts = shapes(passing)
                whole_s = model.costs.step_s(prefills, contexts)
                seconds_by_set[membership] = max(0.0, whole_s - model.head_s(len(prefills) + len(contexts)))
            seconds += seconds_by_set[membership] * computing / model.depth
            if low >= version.here:
                sent = max(sent, sum(chunk.tokens for chunk in passing))
        return seconds + (self._hop_s(sent) if sent else 0.0)

    def _hop_s(self, tokens: int) -> float:
        model = self.model
        sent_s = 2 * tokens * model.state_bytes * 8 / (model.hop_gbit_per_s * 1e9) if model.hop_gbit_per_s else 0.0
        return model.hop_s + sent_s


class TwinLink:
    """A link of ``gbit_per_s`` on which transfers follow each other; ``sent`` are (begin, end, bytes) of pieces."""

    def __init__(self, gbit_per_s: float) -> None:
        self._second = gbit_per_s * 1e9 / 8
        self.sent: list[tuple[float, float, int]] = []

    def send(self, now_s: float, pieces: Sequence[int]) -> list[float]:
        """Return the times at which each of ``pieces`` [bytes], sent from ``now_s`` on, has come."""
        free = max(now_s, self.sent[-1][1] if self.sent else 0.0)
        for piece in pieces:
            self.sent.append((free, free + piece / self._second, piece))
            free = self.sent[-1][1]
        return [end for _, end, _ in self.sent[len(self.sent) - len(pieces) :]]


class TwinPrefix:
    """A stored prefix of ``tokens`` tokens whose pieces come over ``link``, the E-cache first, as ``StoredPrefix``."""

    def __init__(self, executor: TwinExecutor, link: TwinLink, tokens: int, group: Group) -> None:
        self.tokens, self.redo = tokens, group.layers
        self._executor, self._link = executor, link
        self._left = [layer for layer in range(executor.model.depth) if layer not in group]
        self._due: list[float] = []

    @property
    def complete(self) -> bool:
        """Return whether every reused layer was handed over."""
        return not self._left

    def begin(self) -> None:
        """Send the pieces of the prefix over the link from now on."""
        model = self._executor.model
        pieces = [model.state_bytes * self.tokens, *[model.kv_bytes * self.tokens] * len(self._left)]
        self._due = self._link.send(self._executor.now(), pieces)

    def hidden_states(self) -> Tensor | None:
        """Return a tensor in the place of the E-cache, once that has come, else None."""
        return torch.empty(1, self.tokens, 0) if self._executor.now() >= self._due[0] else None

    def arrived(self) -> list[tuple[int, Tensor]]:
        """Return the layers that have come since the last call, with keys and values that have no width."""
        come = bisect_right(self._due, self._executor.now()) - (len(self._due) - len(self._left))
        came, self._left = self._left[: max(0, come)], self._left[max(0, come) :]
        return [(layer, torch.empty(2, 1, 1, self.tokens, 0)) for layer in came]

    def close(self) -> None:
        """Do nothing: pieces that were sent still take their time on the link."""


class TwinArrivals:
    """The arrival of a model's ends and layers at ``times_s`` [1 + layers], on the clock of ``executor``."""

    over = None  # nobody waits for it: a simulated neighbour does not go

    def __init__(self, executor: TwinExecutor, times_s: Sequence[float]) -> None:
        self._executor, self._times_s = executor, times_s

    @property
    def layers(self) -> int:
        """Return the number of layers that are here."""
        return max(0, bisect_right(self._times_s, self._executor.now()) - 1)

    def wait(self, layers: int = 0) -> None:
        """Advance the clock until the ends and ``layers`` layers are here."""
        self._executor.wait_until(self._times_s[layers])


class WarmNeighbour:
    """A lease on all layers that nobody ends."""

    first, gone = 0, ""

    def close(self, reason: str = "") -> None:
        """Do nothing: a simulated neighbour needs no release."""


class TwinBorrower(BorrowingReplica):
    """The replica that borrows, with versions that stand for layers."""

    def _ready_view(self) -> TwinVersion:
        return self._view()

    def _view(self) -> TwinVersion:
        depth = len(self._layers)
        return TwinVersion(depth, frozenset(range(depth)), self.here)


class TwinOwn(GrowingReplica):
    """A replica with its own layers alone, as ``StagedReplica``: ``stages`` are (seconds, version) still to come."""

    def __init__(self, engine: Engine, stages: Sequence[tuple[float, TwinVersion]]) -> None:
        self.engine, self._stages = engine, list(stages)

    def step(self) -> list[tuple[Request, int]]:
        """Take over a stage that has come, and process one batch. Raises what kept a request from moving."""
        while self._stages and self._stages[0][0] <= self.engine.executor.now():
            _, version = self._stages.pop(0)
            if lost := self.engine.publish(version, lambda old, new: range(new.depth)):
                raise lost[0][1]
        return self.engine.step()

    def close(self) -> None:
        """Do nothing: nothing is borrowed."""


@dataclass(frozen=True)
class TwinWindow:
    """The simulated window of one arm of a draw: its ``row``, as ``seen`` has it, and the objects that made it."""

    row: dict[str, Any]
    requests: list[Request | None]
    executor: TwinExecutor
    engine: Engine
    prefixes: TwinLink


def window(
    model: TwinModel,
    config: FiveConfig,
    ideas: Sequence[str],
    requests: Sequence[Asked],
    blocks: int,
    gbit_per_s: float | None = None,
    group_rule: GroupRule = group_at,
) -> TwinWindow:
    """Serve ``requests`` ({prompt, new_tokens, arrival_s, stored_tokens}) from a cold start, simulated.

    ``gbit_per_s`` overrides the rate of the link that brings the model; 0 is all of it at once.
    """
    rate = config.gbit_per_s if gbit_per_s is None else gbit_per_s
    executor = TwinExecutor(model, blocks, 4 * blocks if CROSS_POINT in ideas else 0)
    prefixes = TwinLink(config.prefix_gbit_per_s)
    replica, loaded_s = started(executor, config, ideas, rate)
    wanted = offers(executor, config, ideas, prefixes, group_rule)
    served = serve(replica, requests, wanted, 0.0, config.limit_s)
    row = seen(served, 0.0, executor.now()) | {"loaded_s": round(loaded_s, 4), "ended_s": round(executor.now(), 4)}
    row |= {"arrival_s": [request["arrival_s"] for request in requests]}
    return TwinWindow(row, served, executor, replica.engine, prefixes)


def started(
    executor: TwinExecutor, config: FiveConfig, ideas: Sequence[str], gbit_per_s: float
) -> tuple[ColdReplica, float]:
    """Return the replica of an arm and the time at which it has all of the model; the clock then stands at the moment
    at which the replica may be asked."""
    model, settings = executor.model, engine_config(ideas, config.token_budget, config.running)
    policy = make_policy("online" if CROSS_POINT in ideas else "recompute")
    byte_s = 8 / (gbit_per_s * 1e9) if gbit_per_s else 0.0
    parts_s = [sent * byte_s for sent in accumulate(model.parts)]
    every = frozenset(range(model.depth))
    if BORROWING in ideas:
        times_s = parts_s if STAGES in ideas else [parts_s[0], *[parts_s[-1]] * model.depth]
        arrivals, layers = TwinArrivals(executor, times_s), [torch.nn.Identity()] * model.depth
        return TwinBorrower(executor, layers, arrivals, WarmNeighbour(), settings, policy=policy), parts_s[-1]
    stages = model.stages if STAGES in ideas else ((sum(model.parts), every),)
    times_s = [sent * byte_s for sent in accumulate(size for size, _ in stages)]
    versions = [TwinVersion(model.depth, layers, model.depth) for _, layers in stages]
    executor.wait_until(times_s[0])
    executor.version = versions[0]
    engine = Engine(executor, settings, policy=policy)
    return TwinOwn(engine, list(zip(times_s[1:], versions[1:], strict=True))), times_s[-1]


def offers(
    executor: TwinExecutor, config: FiveConfig, ideas: Sequence[str], link: TwinLink, group_rule: GroupRule
) -> Wanted:
    """Return the function that gives the sender's offer for a request: None where it has no stored prefix, or the arm
    takes none."""

    def offer(request: Mapping[str, Any]) -> PrefixOffer | None:
        if FOREIGN not in ideas or not (tokens := request["stored_tokens"]):
            return None
        group = Group(config.group_start, config.group_end)
        return PrefixOffer(
            group, config.edges, lambda own_layers: TwinPrefix(executor, link, tokens, own_layers), group_rule
        )

    return offer


def capacity_of(model: TwinModel, config: FiveConfig, requests: Sequence[Asked]) -> float:
    """Return the requests a second of the warm replica, which has the whole model and blocks for all, and all requests
    at once."""
    needed = sum(len(request["prompt"]) + request["new_tokens"] + BLOCK_TOKENS for request in requests)
    at_once = [request | {"arrival_s": 0.0} for request in requests]
    unlimited = FiveConfig(**{**vars(config), "limit_s": float("inf")})
    served = window(model, unlimited, (CHUNKS,), at_once, needed // BLOCK_TOKENS, 0.0)
    return len(requests) / max(served.row["last_s"])
