"""Wrong versions of what CPS describes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from firsttoken.cps.policies import CrossPoint, OnlineCrossPoint
from firsttoken.cps.policies.online import CostCurve
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.request import Phase
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.engine.swap import coalesced, per_block
from firsttoken.engine.swap.block_copier import Move
from firsttoken.engine.swap.coalesced import Overlapped
from firsttoken.engine.swap.host_pool import Span
from mutants.running import Mutation


def inverted() -> None:
    def choose(self: CrossPoint, tokens: int, now_s: float) -> Action:
        return Action.RECOMPUTE if tokens <= self.threshold else Action.SWAP

    CrossPoint.choose = choose


def says_nothing() -> None:
    CrossPoint.choose = lambda self, tokens, now_s: None


def raises() -> None:
    def choose(self: CrossPoint, tokens: int, now_s: float) -> Action:
        raise KeyError(tokens)

    CrossPoint.choose = choose


def queue_without_order() -> None:
    def resume(self: Scheduler) -> None:
        for request in sorted(self.swapped, key=lambda request: request.order):
            blocks = self.pool.take(self._missing(request, request.cached + 1), admission=True)
            if blocks is not None:
                request.blocks = blocks
                self.preemptor.restore(request)
                self.move_to(request, Phase.RUNNING if self.preemptor.poll(request) else Phase.RESTORING)

    Scheduler.resume = resume


def slow_gather() -> None:
    gather = coalesced.HostRows.gather

    def waits(self: coalesced.HostRows, blocks: Sequence[int], span: Span) -> Move:
        move = gather(self, blocks, span)
        return lambda: (time.sleep(0.05), move())[1]

    coalesced.HostRows.gather = waits


def sorted_blocks() -> None:
    scatter = coalesced.HostRows.scatter
    coalesced.HostRows.scatter = lambda self, span, blocks: scatter(self, span, sorted(blocks))


def keys_only() -> None:
    pieces = per_block._pieces
    per_block._pieces = lambda rows: [row[::2] for row in pieces(rows)]


def no_transfer() -> None:
    Overlapped.into = lambda self, span, blocks: None


def never_learns() -> None:
    OnlineCrossPoint.observe = lambda self, seen: None


def the_dearer_way() -> None:
    predict = OnlineCrossPoint.predict
    OnlineCrossPoint.predict = lambda self, action, tokens: 1 / (predict(self, action, tokens) + 1e-9)


def never_forgets() -> None:
    begin = CostCurve.__init__
    CostCurve.__init__ = lambda self, memory: begin(self, 1e9)


MUTATIONS: list[Mutation] = [
    Mutation("03", "the cross-point inverted", inverted, "cross-point policy"),
    Mutation("03", "a policy that says nothing", says_nothing, "cross-point policy"),
    Mutation("22", "the cross-point inverted", inverted, "cross-point policy", quick=True),
    Mutation("22", "a policy that says nothing", says_nothing, "cross-point policy"),
    Mutation("22", "a policy that raises", raises, "cross-point policy"),
    Mutation("22", "whoever fits comes back", queue_without_order, "queue of swapped requests"),
    Mutation("21", "each gather 50 ms slower", slow_gather, "coalesced swap", quick=True),
    Mutation("21", "blocks back in another order", sorted_blocks, "(coalesced|overlapped) swap"),
    Mutation("21", "keys without values", keys_only, "per_block swap"),
    Mutation("21", "a swap that returns nothing", no_transfer, "overlapped swap"),
    Mutation("23", "a policy that never learns", never_learns, "online cross-point"),
    Mutation("23", "the dearer way is taken", the_dearer_way, "online cross-point"),
    Mutation("23", "nothing is forgotten", never_forgets, "online cross-point"),
]
