"""Steps of several sessions as one: what waits while a batch is computed is the next batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from firsttoken.engine.work import Work
from firsttoken.swarm.stack import BlockStack

Answer = TypeVar("Answer")


class Waiting(NamedTuple):
    """A session's step: ``works`` and their ``hidden`` [tokens, hidden], end to end, through ``layers``."""

    layers: range
    works: Sequence[Work]
    hidden: Tensor
    answer: asyncio.Future[Tensor]


class Batcher:
    """Computes on the one ``thread``, at most ``tokens`` at once, in the order in which steps came."""

    def __init__(self, stack: BlockStack, tokens: int, thread: ThreadPoolExecutor) -> None:
        self.stack = stack
        self.tokens = tokens
        self.batches = 0
        self.steps = 0  # of sessions; more than ``batches`` where some were computed together
        self._waiting: list[Waiting] = []
        self._came = asyncio.Event()
        self._thread = thread

    async def run(self, layers: range, works: Sequence[Work], hidden: Tensor) -> Tensor:
        """``hidden`` [tokens, hidden] after ``layers``; raises what computing raises."""
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(layers, works, hidden, answer))
        self._came.set()
        return await answer

    async def serve(self) -> None:
        """Compute batch after batch, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._came.wait()
            batch = self._next()
            try:
                out = await loop.run_in_executor(self._thread, self._compute, batch)
            except Exception as error:  # out of memory: these sessions learn it, the next may run
                out = [error] * len(batch)
            self.batches += 1
            self.steps += len(batch)
            for one, said in zip(batch, out, strict=True):
                if one.answer.done():  # its session has ended
                    continue
                one.answer.set_exception(said) if isinstance(said, Exception) else one.answer.set_result(said)

    async def aside(self, what: Callable[[], Answer]) -> Answer:
        """What ``what`` returns or raises, on the thread that computes: behind its batch, and before the next."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, what)

    def close(self) -> None:
        """End the thread when its batch is done."""
        self._thread.shutdown(wait=False)

    def _next(self) -> list[Waiting]:
        """The first that waits, and those that fit with it: of the same layers, as far as the tokens go."""
        first, batch, room = self._waiting[0], [], self.tokens
        for one in list(self._waiting):
            if one.layers == first.layers and (not batch or len(one.hidden) <= room):
                batch.append(one)
                room -= len(one.hidden)
                self._waiting = [other for other in self._waiting if other is not one]
        if not self._waiting:
            self._came.clear()
        return batch

    def _compute(self, batch: Sequence[Waiting]) -> list[Tensor]:
        works = [work for one in batch for work in one.works]
        rows = [rows for one in batch for rows in one.hidden.split([work.tokens for work in one.works])]
        out = iter(self.stack.run(batch[0].layers, works, rows))
        return [torch.cat([next(out) for _ in one.works]) for one in batch]
