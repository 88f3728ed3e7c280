"""A client's way through the servers for training: what entered each is kept until the gradient comes back."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import torch
from torch import Tensor

from firsttoken.study.errors import RequestError, SwarmError
from firsttoken.swarm.records import Record
from firsttoken.swarm.service import PASS
from firsttoken.swarm.session import HEADERS
from firsttoken.swarm.swarm import Swarm
from firsttoken.swarm.tuning.passes import Adapters, Pass, decode_pass, encode_pass
from firsttoken.swarm.wire import MOST_TOKENS, VERSION, most_bytes

_BACKWARD = 3  # times the patience: forward again, and twice its products


class Entered(NamedTuple):
    """``hidden`` [rows, tokens, hidden] entered ``blocks`` of one server."""

    blocks: range
    hidden: Tensor


class TrainingChain:
    """``layers`` on the servers of ``swarm``, of which those that do not train are passed by. Lives in its loop."""

    def __init__(self, swarm: Swarm, layers: range) -> None:
        self.swarm = swarm
        self.layers = layers
        self.faults: list[tuple[str, str]] = []  # (subkey, why) of each server that was replaced
        self.moved_bytes = 0  # of messages that were answered, both ways
        self._failing_s: float | None = None  # since when nobody has answered

    async def forward(self, hidden: Tensor, adapters: Adapters, scaling: float) -> tuple[Tensor, list[list[Entered]]]:
        """``hidden`` [rows, tokens, hidden] after the layers, and what entered whom, for each part of the batch that
        fits a message. Raises SwarmError when blocks stay unserved, RequestError for what no server takes."""
        parts = [await self._forward(self.layers, rows, adapters, scaling) for rows in _parts(hidden)]
        return torch.cat([out for out, _ in parts]), [entered for _, entered in parts]

    async def backward(
        self, entered: list[list[Entered]], gradient: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, Adapters]:
        """The gradients of ``hidden`` and of the adapters, from that of what came out. Raises as ``forward``."""
        firsts: list[Tensor] = []
        sums: Adapters = {}
        for part, rows in zip(entered, _parts(gradient), strict=True):
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
        at = layers.start
        while at < layers.stop:
            hop, record = (await self.swarm.route(range(at, layers.stop)))[0]
            asked = Pass(hidden, _within(adapters, hop.blocks), scaling)
            if (answer := await self._ask(record, hop.blocks, asked)) is not None:
                entered.append(Entered(hop.blocks, hidden))
                hidden, at = answer.hidden, hop.blocks.stop
        return hidden, entered

    async def _backward(
        self, one: Entered, gradient: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, Adapters]:
        while True:
            (hop, record), *others = await self.swarm.route(one.blocks)
            if others:  # whoever took over has other blocks: its inputs are computed on the way
                _, entered = await self._forward(one.blocks, one.hidden, adapters, scaling)
                halves: Adapters = {}
                for part in reversed(entered):
                    gradient, more = await self._backward(part, gradient, adapters, scaling)
                    halves |= more
                return gradient, halves
            asked = Pass(one.hidden, _within(adapters, hop.blocks), scaling, gradient)
            if (answer := await self._ask(record, hop.blocks, asked)) is not None:
                return answer.hidden, answer.adapters

    async def _ask(self, record: Record, blocks: range, asked: Pass) -> Pass | None:
        """The answer of one server; None when it failed, and is not asked for a while.

        Raises SwarmError, once it has been the last for ``find_s``, and RequestError for what every server refuses.
        """
        import grpc

        swarm, message = self.swarm, encode_pass(asked)
        if len(message) > (most := most_bytes(asked.hidden.shape[2], len(blocks))):
            raise RequestError(f"a pass of {len(message):,} bytes; at most {most:,} are taken: fewer tokens or ranks")
        tokens = asked.hidden.shape[0] * asked.hidden.shape[1]
        limit_s = swarm.patience.limit_s(tokens) * (1 if asked.gradient is None else _BACKWARD)
        opened = zip(HEADERS, (VERSION, swarm.model, f"{blocks.start}:{blocks.stop}", "float32"), strict=True)
        headers = (*opened, *swarm.access.headers)
        try:
            call = swarm.channel(record.address).unary_unary(PASS)
            data = await call(message, timeout=limit_s, metadata=headers)
            said = _answer(decode_pass(data, asked.hidden.shape[2]), asked)
            self._failing_s = None
            self.moved_bytes += len(message) + len(data)
            return said
        except grpc.aio.AioRpcError as error:
            codes = grpc.StatusCode
            why = error.details() or error.code().name
            if error.code() in (codes.INVALID_ARGUMENT, codes.UNAUTHENTICATED):
                raise RequestError(f"{record.name} refuses: {why}") from None
        except (SwarmError, grpc.aio.UsageError) as error:
            why = str(error)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            why = "its connection was closed"
        self.faults.append((record.server, why))
        failing_s = self._failing_s = self._failing_s or time.monotonic()
        if time.monotonic() - failing_s > (most := swarm.patience.find_s):
            self._failing_s = None  # whoever tries again has as long
            raise SwarmError(f"{record.name}: {why} (and who took over failed, too, for {most:g} s)")
        swarm.ban(record.server)
        await swarm.reconnect(record.address)
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
