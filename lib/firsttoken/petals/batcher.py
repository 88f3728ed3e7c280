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
from firsttoken.petals.fairness import HERE, Client, FairQueue
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.messages import end_to_end, split_rows
from firsttoken.study.errors import SwarmError

Answer = TypeVar("Answer")
Computed: TypeAlias = "Future[list[Tensor | Exception]]"
"""What is said to each step of a batch, or why not."""

_ENDS = "this server ends: ask another"


@dataclass(frozen=True, eq=False)
class WaitingStep:
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
        self._waiting: list[WaitingStep] = []
        self._arrived = asyncio.Event()
        self._turns = FairQueue()
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
        entry = WaitingStep(client, layers, chunks, hidden, asyncio.get_running_loop().create_future(), adapter)
        self._waiting.append(entry)
        self._arrived.set()
        try:
            return await entry.answer
        finally:
            if entry in self._waiting:  # its session ended before its turn
                self._waiting.remove(entry)
                self.slots.release(chunks)

    async def serve(self) -> None:
        """Compute batch after batch, until it is cancelled; who waits then hears that the server ends."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while self._waiting:
                    batch, ran = self._next(), loop.create_future()
                    # Not awaited itself: a cancellation would be passed on to it, and ``_finish`` would neither answer
                    # the steps of this batch nor give their blocks back.
                    self._thread.submit(self._compute, batch).add_done_callback(partial(self._notify, loop, batch, ran))
                    await ran
        finally:
            self._ended = True
            for entry in self._waiting:
                if not entry.answer.done():
                    entry.answer.set_exception(SwarmError(_ENDS))

    async def run_between(self, compute: Callable[[], Answer]) -> Answer:
        """Run ``compute`` on the thread that computes, between two batches; return or raise what that does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)

    def close(self) -> None:
        """End the thread when its batch is done."""
        self._thread.shutdown(wait=False)

    def _next(self) -> list[WaitingStep]:
        """The first step of the client whose turn it is, and those that fit with it: of the same layers, as far as the
        tokens go."""
        client = self._turns.next(dict.fromkeys(entry.client for entry in self._waiting))
        entry = next(entry for entry in self._waiting if entry.client == client)
        layers, batch, room = entry.layers, [], self.tokens
        while entry is not None:
            batch.append(entry)
            self._waiting.remove(entry)
            self._turns.charge(entry.client, len(entry.hidden) * len(layers))
            room -= len(entry.hidden)
            heads: dict[Client, WaitingStep] = {}
            for other in self._waiting:
                if other.layers == layers and len(other.hidden) <= room:
                    heads.setdefault(other.client, other)
            entry = heads[min(heads, key=self._turns.tag)] if heads else None
        return batch

    def _notify(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[WaitingStep], ran: asyncio.Future[None], job: Computed
    ) -> None:
        """Go on in the loop, from the thread that has computed."""
        with suppress(RuntimeError):  # it is closed, and nobody waits any more
            loop.call_soon_threadsafe(self._finish, batch, ran, job)

    def _finish(self, batch: Sequence[WaitingStep], ran: asyncio.Future[None], job: Computed) -> None:
        error = job.exception()
        for entry, result in zip(batch, [error] * len(batch) if error else job.result(), strict=True):
            self.slots.release(entry.chunks)
            if entry.answer.done():  # its session has ended
                continue
            entry.answer.set_exception(result) if isinstance(result, BaseException) else entry.answer.set_result(result)
        if not ran.done():
            ran.set_result(None)

    def _compute(self, batch: Sequence[WaitingStep]) -> list[Tensor | Exception]:
        """Return for each step its answer, or the error where it failed: one that cannot be computed fails no other of
        its batch."""
        try:
            chunks = [chunk for entry in batch for chunk in entry.chunks]
            rows = [rows for entry in batch for rows in split_rows(entry.hidden, entry.chunks)]
            adapters = [entry.adapter for entry in batch for _ in entry.chunks]
            out = iter(self.backend.run(batch[0].layers, chunks, rows, *([adapters] if any(adapters) else [])))
            return [end_to_end([next(out) for _ in entry.chunks]) for entry in batch]
        except Exception as error:  # out of memory: these sessions learn it, the next may run
            return [error] if len(batch) == 1 else [result for entry in batch for result in self._compute([entry])]
