"""Wrong versions of what PETALS describes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mutants.running import Mutation


def _one_scale_for_all() -> None:
    from firsttoken.petals import int8_transport

    def pack(hidden: Tensor, block: int = int8_transport.BLOCK) -> dict[str, Tensor]:
        rows = int8_transport._in_blocks(hidden.float(), block)
        scales = (rows.abs().amax() / 127).expand(rows.shape[:-1]).contiguous()
        codes = (rows / scales[..., None]).round().to(torch.int8).flatten(-2)[..., : hidden.shape[-1]].contiguous()
        return {"codes": codes, "scales": scales, "block": torch.tensor([block], dtype=torch.int32)}

    int8_transport.pack = pack


def _nothing_comes_back() -> None:
    from firsttoken.petals import int8_transport

    int8_transport.unpack = lambda tensors, dtype: None


def _outliers_in_the_integers() -> None:
    from firsttoken.engine.linear8 import Linear8

    usual = Linear8.forward

    def forward(self: Linear8, x: Tensor) -> Tensor:
        self.threshold = float("inf")
        return usual(self, x)

    Linear8.forward = forward


def _where_most_is() -> None:
    from firsttoken.petals import placement

    usual = placement._neediest
    placement._neediest = lambda rates, count: usual(-rates, count)


def _no_place() -> None:
    from firsttoken.petals import placement

    placement.interval_to_join = lambda servers, depth, count: range(0)


def _blind_to_round_trips() -> None:
    from firsttoken.petals import routing

    usual = routing.best_chain

    def best_chain(servers, layers, without=()):
        near = {one.name: one for one in servers}
        hops = usual([replace(one, ping_s=0.0) for one in servers], layers, without)
        return [routing.Hop(near[hop.server.name], hop.blocks) for hop in hops]

    routing.best_chain = best_chain


def _no_successor() -> None:
    from firsttoken.petals.chain import Chain

    usual = Chain._extend

    async def extend(self: Chain, layers, why="", *rest):
        return [] if why else await usual(self, layers, why, *rest)

    Chain._extend = extend


def _nothing_was_kept() -> None:
    from firsttoken.engine.hidden_state_cache import HiddenStateCache

    usual = HiddenStateCache.of

    def of(self: HiddenStateCache, request: int, layer: int) -> Tensor:
        kept = usual(self, request, layer)
        return torch.cat([torch.zeros_like(kept[:, :-1]), kept[:, -1:]], 1) if kept.shape[1] > 8 else kept

    HiddenStateCache.of = of


def _the_gradient_passes_through() -> None:
    from firsttoken.petals.tuning.frozen import FrozenBlocks

    usual = FrozenBlocks._backward
    FrozenBlocks._backward = lambda self, layers, hidden, gradient, one: (
        gradient,
        usual(self, layers, hidden, gradient, one)[1],
    )


def _a_server_learns() -> None:
    from firsttoken.petals.tuning.frozen import FrozenBlocks

    usual = FrozenBlocks._forward

    def forward(self, layers, *rest):
        out = usual(self, layers, *rest)
        for layer in self._model.model.layers:
            layer.mlp.down_proj.weight.data.mul_(0.99)
        return out

    FrozenBlocks._forward = forward


def _whatever_is_said_agrees() -> None:
    from firsttoken.petals.trust import auditor

    auditor.difference = lambda said, there: 0.0


def _the_accused_is_believed() -> None:
    from firsttoken.petals.trust.auditor import Auditor

    async def convicts(self: Auditor, evidence) -> bool:
        return False

    Auditor._convicts = convicts


def _all_or_nothing_is_taken_over() -> None:
    from firsttoken_extras.layer_borrowing.replica import BorrowingReplica

    right = BorrowingReplica._switch_to
    BorrowingReplica._switch_to = lambda self, come: right(self, come) if come == len(self._layers) else None


MUTATIONS: list[Mutation] = [
    Mutation("06", "a chain that does not replace", _no_successor, "session that keeps what it sent", quick=True),
    Mutation("06", "a successor is sent zeros", _nothing_was_kept, "session that keeps what it sent"),
    Mutation("51", "one scale for a batch", _one_scale_for_all, "the 8-bit wire"),
    Mutation("51", "an 8-bit wire that answers nothing", _nothing_comes_back, "the 8-bit wire", quick=True),
    Mutation("51", "outliers in the integers", _outliers_in_the_integers, "LLM.int8's product"),
    Mutation("52", "a server goes where most is", _where_most_is, "chooses its blocks", quick=True),
    Mutation("52", "a server takes no blocks", _no_place, "chooses its blocks"),
    Mutation("52", "a chain blind to round trips", _blind_to_round_trips, "search of the best chain"),
    Mutation("50", "a chain that does not replace", _no_successor, "chain that replaces a server"),
    Mutation("50", "a successor is sent zeros", _nothing_was_kept, "chain that replaces a server"),
    Mutation("53", "a server passes the gradient on", _the_gradient_passes_through, "training through frozen servers"),
    Mutation("53", "a server learns", _a_server_learns, "training through frozen servers"),
    Mutation("54", "an audit that always agrees", _whatever_is_said_agrees, "audit of answers"),
    Mutation("54", "a keeper that convicts nobody", _the_accused_is_believed, "audit of answers"),
    Mutation("56", "all layers or none are taken over", _all_or_nothing_is_taken_over, "borrowing layers"),
    Mutation("56", "layers are taken over from zeros", _nothing_was_kept, "borrowing layers"),
]
