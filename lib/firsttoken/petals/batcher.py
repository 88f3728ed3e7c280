"""Steps of several sessions as one: what waits while a batch is computed is the next batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from torch import Tensor

from firsttoken.engine.request import ScheduledChunk
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.fairness import HERE, Client, Turns
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.states import end_to_end
from firsttoken.study.errors import SwarmError

Answer = TypeVar("Answer")
Computed: TypeAlias = "Future[list[Tensor | Exception]]"
"""What is said to each step of a batch, or why not."""

_ENDS = "this server ends: ask another"


@dataclass(frozen=True, eq=False)
class Waiting:
    """A step of a session of ``client``: ``chunks`` and their ``hidden`` [tokens, hidden], end to end, through
    ``layers`` with the ``adapter`` of that name ("": none)."""

    client: Client
    layers: range
    chunks: Sequence[ScheduledChunk]
    hidden: Tensor
    answer: asyncio.Future[Tensor]
    adapter: str = ""


class Batcher:
    """Computes on the one ``thread``, at most ``tokens`` at once, of each client in the order in which its steps came.

    Between clients the turns are fair in tokens times layers: however many steps one has waiting, the next batch begins
    with whoever had least. A step has its blocks in ``slots`` from when it is handed over until it has run, even when
    nobody waits for it any more, or until it was taken out because its session ended before its turn.
    """

    def __init__(self, backend: BlockBackend, slots: KVSlots, tokens: int, thread: ThreadPoolExecutor) -> None:
        self.backend = backend
        self.slots = slots
        self.tokens = tokens
        self._waiting: list[Waiting] = []
        self._came = asyncio.Event()
        self._turns = Turns()
        self._thread = thread
        self._ended = False

    async def run(
        self, layers: range, chunks: Sequence[ScheduledChunk], hidden: Tensor, client: Client = HERE, adapter: str = ""
    ) -> Tensor:
        """Return ``hidden`` [tokens, hidden] after ``layers`` with ``adapter``. Raises what computing raises, and
        SwarmError where the server ends before."""
        if self._ended:
            raise SwarmError(_ENDS)
        self.slots.lease(chunks)
        one = Waiting(client, layers, chunks, hidden, asyncio.get_running_loop().create_future(), adapter)
        self._waiting.append(one)
        self._came.set()
        try:
            return await one.answer
        finally:
            if one in self._waiting:  # its session ended before its turn
                self._waiting.remove(one)
                self.slots.release(chunks)

    async def serve(self) -> None:
        """Compute batch after batch, until it is cancelled; who waits then hears that the server ends."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._came.wait()
                self._came.clear()
                while self._waiting:
                    batch, ran = self._next(), loop.create_future()
                    # Not awaited itself: a cancellation would be passed on to it, and ``_ran`` would neither answer the
                    # steps of this batch nor give their blocks back.
                    self._thread.submit(self._compute, batch).add_done_callback(partial(self._tell, loop, batch, ran))
                    await ran
        finally:
            self._ended = True
            for one in self._waiting:
                if not one.answer.done():
                    one.answer.set_exception(SwarmError(_ENDS))

    async def aside(self, what: Callable[[], Answer]) -> Answer:
        """Run ``what`` on the thread that computes, between two batches; return or raise what that does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, what)

    def close(self) -> None:
        """End the thread when its batch is done."""
        self._thread.shutdown(wait=False)

    def _next(self) -> list[Waiting]:
        """The first step of the client whose turn it is, and those that fit with it: of the same layers, as far as the
        tokens go."""
        client = self._turns.next(dict.fromkeys(one.client for one in self._waiting))
        one = next(one for one in self._waiting if one.client == client)
        layers, batch, room = one.layers, [], self.tokens
        while one is not None:
            batch.append(one)
            self._waiting.remove(one)
            self._turns.charge(one.client, len(one.hidden) * len(layers))
            room -= len(one.hidden)
            heads: dict[Client, Waiting] = {}
            for other in self._waiting:
                if other.layers == layers and len(other.hidden) <= room:
                    heads.setdefault(other.client, other)
            one = heads[min(heads, key=self._turns.tag)] if heads else None
        return batch

    def _tell(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[Waiting], ran: asyncio.Future[None], job: Computed
    ) -> None:
        """Go on in the loop, from the thread that has computed."""
        with suppress(RuntimeError):  # it is closed, and nobody waits any more
            loop.call_soon_threadsafe(self._ran, batch, ran, job)

    def _ran(self, batch: Sequence[Waiting], ran: asyncio.Future[None], job: Computed) -> None:
        error = job.exception()
        for one, said in zip(batch, [error] * len(batch) if error else job.result(), strict=True):
            self.slots.release(one.chunks)
            if one.answer.done():  # its session has ended
                continue
            one.answer.set_exception(said) if isinstance(said, BaseException) else one.answer.set_result(said)
        if not ran.done():
            ran.set_result(None)

    def _compute(self, batch: Sequence[Waiting]) -> list[Tensor | Exception]:
        """What is said to each step, or why not: one that cannot be computed fails no other of its batch."""
        try:
            chunks = [chunk for one in batch for chunk in one.chunks]
            rows = [rows for one in batch for rows in _apart(one)]
            adapters = [one.adapter for one in batch for _ in one.chunks]
            out = iter(self.backend.run(batch[0].layers, chunks, rows, *([adapters] if any(adapters) else [])))
            return [end_to_end([next(out) for _ in one.chunks]) for one in batch]
        except Exception as error:  # out of memory: these sessions learn it, the next may run
            return [error] if len(batch) == 1 else [said for one in batch for said in self._compute([one])]


def _apart(one: Waiting) -> Sequence[Tensor]:
    """The hidden states of each of its chunks."""
    return one.hidden.split([chunk.tokens for chunk in one.chunks]) if len(one.chunks) > 1 else [one.hidden]
