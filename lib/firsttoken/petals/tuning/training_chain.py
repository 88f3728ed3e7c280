"""A client's way through the servers for training: what entered each is kept until the gradient comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from firsttoken.petals.cover import check_cover
from firsttoken.petals.line import REFUSALS
from firsttoken.petals.records import Record
from firsttoken.petals.routing import Hop
from firsttoken.petals.service import PASS
from firsttoken.petals.session import HEADERS
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.tuning.passes import Adapters, Pass, decode_pass, encode_pass
from firsttoken.petals.wire import MOST_TOKENS, VERSION, most_bytes
from firsttoken.study.errors import RequestError, SwarmError

_BACKWARD = 3  # times the patience: forward again, and twice its products


class Entered(NamedTuple):
    """``hidden`` [rows, tokens, hidden] entered ``blocks`` of one server."""

    blocks: range
    hidden: Tensor


@dataclass
class _Failing:
    """Since when (monotonic clock, 0: not) nobody answers a pass, ``why``, and who has ``refused`` it (subkeys)."""

    since_s: float = 0.0
    why: str = ""
    refused: set[str] = field(default_factory=set)


class TrainingChain:
    """``layers`` on the servers of ``swarm``, of which those that do not train are passed by. Lives in its loop."""

    def __init__(self, swarm: Swarm, layers: range) -> None:
        self.swarm = swarm
        self.layers = layers
        self.faults: list[tuple[str, str]] = []  # (subkey, why) of each server that was replaced
        self.moved_bytes = 0  # of messages that were answered, both ways

    async def forward(self, hidden: Tensor, adapters: Adapters, scaling: float) -> tuple[Tensor, list[list[Entered]]]:
        """``hidden`` [rows, tokens, hidden] after the layers, and what entered whom, for each part of the batch that
        fits a message. Raises SwarmError when blocks stay unserved, RequestError for what all refuse who serve them."""
        parts = [await self._forward(self.layers, rows, adapters, scaling) for rows in _parts(hidden)]
        return torch.cat([out for out, _ in parts]), [entered for _, entered in parts]

    async def backward(
        self, entered: list[list[Entered]], gradient: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, Adapters]:
        """The gradients of ``hidden`` and of the adapters, from that of what came out. Raises as ``forward``."""
        firsts: list[Tensor] = []
        sums: Adapters = {}
        for part, rows in zip(entered, _parts(gradient), strict=True):
            check_cover([one.blocks for one in part], self.layers)
            for one in reversed(part):
                rows, halves = await self._backward(one, rows, adapters, scaling)
                for where, (a, b) in halves.items():
                    known = sums.get(where)
                    sums[where] = (a, b) if known is None else (known[0] + a, known[1] + b)
            firsts.append(rows)
        return torch.cat(firsts), sums

    async def _forward(
        self, layers: range, hidden: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, list[Entered]]:
        entered: list[Entered] = []
        at, failing = layers.start, _Failing()
        while at < layers.stop:
            hop, record = (await self._route(range(at, layers.stop), failing))[0]
            asked = Pass(hidden, _within(adapters, hop.blocks), scaling)
            if (answer := await self._ask(record, hop.blocks, asked, failing)) is not None:
                entered.append(Entered(hop.blocks, hidden))
                hidden, at, failing = answer.hidden, hop.blocks.stop, _Failing()
        check_cover([one.blocks for one in entered], layers)
        return hidden, entered

    async def _backward(
        self, one: Entered, gradient: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, Adapters]:
        failing = _Failing()
        while True:
            (hop, record), *others = await self._route(one.blocks, failing)
            if others:  # whoever took over has other blocks: its inputs are computed on the way
                _, entered = await self._forward(one.blocks, one.hidden, adapters, scaling)
                halves: Adapters = {}
                for part in reversed(entered):
                    gradient, more = await self._backward(part, gradient, adapters, scaling)
                    halves |= more
                return gradient, halves
            asked = Pass(one.hidden, _within(adapters, hop.blocks), scaling, gradient)
            if (answer := await self._ask(record, hop.blocks, asked, failing)) is not None:
                return answer.hidden, answer.adapters

    async def _route(self, blocks: range, failing: _Failing) -> list[tuple[Hop, Record]]:
        """As ``Swarm.route``, without those who have refused. Raises RequestError where nobody else has the blocks."""
        until = failing.since_s + self.swarm.patience.find_s if failing.since_s else None
        try:
            return await self.swarm.route(blocks, failing.why, until, failing.refused)
        except SwarmError as error:
            raise (RequestError if failing.refused else SwarmError)(str(error)) from error

    async def _ask(self, record: Record, blocks: range, asked: Pass, failing: _Failing) -> Pass | None:
        """The answer of one server; None when it failed or refused, and is not asked for a while.

        Raises SwarmError once it has been the last for ``find_s``, and RequestError for a pass that is too large
        or holds what no model has.
        """
        import grpc

        swarm, message = self.swarm, encode_pass(asked)
        if len(message) > (most := most_bytes(asked.hidden.shape[2], len(blocks))):
            raise RequestError(f"a pass of {len(message):,} bytes; at most {most:,} are taken: fewer tokens or ranks")
        try:
            decode_pass(message, asked.hidden.shape[2])
        except SwarmError as error:  # as of a training that diverged: no server is to be blamed for it
            raise RequestError(str(error)) from error
        tokens = asked.hidden.shape[0] * asked.hidden.shape[1]
        limit_s = swarm.patience.limit_s(tokens) * (1 if asked.gradient is None else _BACKWARD)
        opened = zip(HEADERS, (VERSION, swarm.model, f"{blocks.start}:{blocks.stop}", "float32"), strict=True)
        headers = (*opened, *swarm.access.headers)
        try:
            call = swarm.channel(record.address).unary_unary(PASS)
            data = await call(message, timeout=limit_s, metadata=headers)
            said = _answer(decode_pass(data, asked.hidden.shape[2]), asked)
            self.moved_bytes += len(message) + len(data)
            return said
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
            if error.code().name in REFUSALS:
                failing.refused.add(record.server)
                why = f"refuses: {why}"
        except (SwarmError, grpc.aio.BaseError) as error:
            why = str(error)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            why = "its connection was closed"
        self.faults.append((record.server, why))
        swarm.conduct.failed(record.server)
        await swarm.reconnect(record.address)
        failing.why = f"{record.name}{' ' if why.startswith('refuses: ') else ': '}{why}"
        failing.since_s = failing.since_s or time.monotonic()
        if time.monotonic() - failing.since_s > (most := swarm.patience.find_s):
            raise SwarmError(f"{failing.why} (and who took over failed, too, for {most:g} s)")
        return None


def _parts(batch: Tensor) -> list[Tensor]:
    """``batch`` [rows, tokens, hidden] as parts that fit a message. Raises RequestError for a row that does not."""
    if batch.shape[1] > MOST_TOKENS:
        raise RequestError(f"a row of {batch.shape[1]} tokens; at most {MOST_TOKENS} are trained on")
    return list(batch.split(max(1, MOST_TOKENS // batch.shape[1])))


def _answer(said: Pass, asked: Pass) -> Pass:
    """``said``. Raises SwarmError where it is no answer: of another shape, or with gradients of other adapters."""
    if said.hidden.shape != asked.hidden.shape:
        raise SwarmError(f"{list(said.hidden.shape)} came for {list(asked.hidden.shape)}")
    if _shapes(said) != (_shapes(asked) if asked.gradient is not None else {}):
        raise SwarmError("gradients came of other adapters than were sent")
    return said


def _shapes(one: Pass) -> dict[tuple[int, str], tuple[torch.Size, torch.Size]]:
    return {where: (a.shape, b.shape) for where, (a, b) in one.adapters.items()}


def _within(adapters: Adapters, blocks: range) -> Adapters:
    return {where: halves for where, halves in adapters.items() if where[0] in blocks}
