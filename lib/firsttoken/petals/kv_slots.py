"""The blocks of a server's pool and what has them: the sequences of all sessions, within its limits, and running steps.

A step has every block that it reads or writes from when it is handed over until it has run or was taken out, whatever
becomes of its sequence meanwhile: a block is given to nobody else before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firsttoken.engine.block_pool import BlockPool
from firsttoken.engine.request import GREEDY, Sampling, ScheduledChunk
from firsttoken.petals.fairness import HERE, Client, busy, client_to_evict
from firsttoken.petals.messages import SequenceChunk
from firsttoken.study.errors import BusyError, RequestError, SwarmError


class MissingTokensError(SwarmError):
    """The server does not have the tokens before a step any more (or never had): send them again."""


class BusyBlocksError(BusyError):
    """The blocks come free when the steps that are under way have run."""


class Rows(NamedTuple):
    """Stands for a request in the engine's step, and says only where its keys and values are."""

    number: int
    blocks: list[int]
    tokens: range  # a server is never told the ids; positions stand in their place
    sampling: Sampling = GREEDY  # what is asked of logits, of which a server has none


@dataclass
class CachedSequence:
    """One sequence of a session: its blocks, and tokens whose keys and values are in them, from layer ``first`` on;
    ``trail`` are digests of what entered. It is ``client``'s, and was ``used`` when it was last placed or computed."""

    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    first: int = 0
    trail: list[bytes] = field(default_factory=list)
    client: Client = field(default=HERE, compare=False)
    used: float = field(default=-math.inf, compare=False)


Sequences = dict[int, CachedSequence]
"""Those of one session, by the numbers that its client gives them."""


class KVSlots:
    """Has room for ``sequences`` of ``context`` tokens each at most, in ``blocks`` blocks of ``block_tokens`` tokens.

    Where there is no room left, sequences of clients that have more than their share make room, and those of which
    nothing was computed for ``spare_s`` seconds. Their sessions learn it at their next step, and send them again.
    """

    def __init__(self, blocks: int, block_tokens: int, sequences: int, context: int, spare_s: float = math.inf) -> None:
        self.pool = BlockPool(blocks)
        self.block_tokens = block_tokens
        self.sequences = sequences
        self.context = context
        self.spare_s = spare_s
        self._homes: dict[int, tuple[Sequences, int, CachedSequence]] = {}  # of all sessions, by the sequence's id
        self._leased: Counter[int] = Counter()  # in how many steps under way a block is
        self._written: set[int] = set()  # by a step under way
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    @property
    def held(self) -> int:
        """Return the number of sequences, of all sessions."""
        return len(self._homes)

    async def placed(
        self, sequences: Sequences, chunks: Sequence[SequenceChunk], first: int = 0, client: Client = HERE
    ) -> list[ScheduledChunk]:
        """Do what ``place`` does, once the steps that use the blocks it needs have run; such calls queue up."""
        if not sum(self._needs(sequences, chunks, first)):
            return self.place(sequences, chunks, first, client)
        async with self._turn:
            while True:
                try:
                    return self.place(sequences, chunks, first, client)
                except BusyBlocksError:
                    self._released.clear()
                    await self._released.wait()

    def place(
        self, sequences: Sequences, chunks: Sequence[SequenceChunk], first: int = 0, client: Client = HERE
    ) -> list[ScheduledChunk]:
        """Return the chunks of a step in a session of ``client`` with these ``sequences``, and take the blocks that
        they need, or none.

        The step begins at layer ``first``: a client may leave layers out from then on, as they have come to it. Raises
        MissingTokensError for a step that begins behind what is cached, or at layers that were left out, RequestError
        beyond the context, BusyError where there is no room, BusyBlocksError where there will be.
        """
        needs = self._needs(sequences, chunks, first)
        new = [chunk.number for chunk in chunks if chunk.number not in sequences]
        keep = {id(sequences[chunk.number]) for chunk in chunks if chunk.number in sequences}
        for number, sequence in self._sequences_to_evict(client, keep, sum(needs), len(new)):
            self.free(self._homes[id(sequence)][0], [number])
        if (taken := self.pool.allocate(sum(needs))) is None:
            raise BusyBlocksError("all blocks are in use by steps that run now: ask again soon")
        scheduled, now = [], time.monotonic()
        for chunk, need in zip(chunks, needs, strict=True):
            if (sequence := sequences.get(chunk.number)) is None:
                sequence = sequences[chunk.number] = CachedSequence(client=client)
                self._homes[id(sequence)] = sequences, chunk.number, sequence
            sequence.blocks += [taken.pop() for _ in range(need)]
            # what lies behind is written anew
            sequence.cached, sequence.first, sequence.used = chunk.start, first, now
            del sequence.trail[chunk.start :]  # by whoever does: nothing is signed of what was there
            rows = Rows(chunk.number, list(sequence.blocks), range(self.context))
            scheduled.append(ScheduledChunk(rows, chunk.start, chunk.end, chunk.start))
        return scheduled

    def lease(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Own the blocks of a step that is under way, until ``release``.

        Raises RuntimeError, and takes nothing, where another step that is under way writes to one of them.
        """
        written = self._writes(chunks)
        if len(set(written)) < len(written) or self._written & set(written):
            raise RuntimeError("two steps would write to one block of keys and values")
        self._written.update(written)
        for chunk in chunks:
            self.pool.allocate(0, shared=chunk.request.blocks)
            self._leased.update(chunk.request.blocks)

    def release(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Give up the blocks of a step that has run, or will not; those whose sequences are gone are free now."""
        self._written.difference_update(self._writes(chunks))
        for chunk in chunks:
            self.pool.release(chunk.request.blocks)
            self._leased -= Counter(chunk.request.blocks)
        self._released.set()

    def computed(self, sequences: Sequences, chunks: Sequence[SequenceChunk]) -> None:
        """Note that a step has left the keys and values of ``chunks`` in the pool."""
        for chunk in chunks:
            if chunk.number in sequences:
                sequences[chunk.number].cached, sequences[chunk.number].used = chunk.end, time.monotonic()

    def free(self, sequences: Sequences, numbers: Iterable[int]) -> None:
        """End these sequences of a session. Their blocks are free, or free once the step that uses them has run.
        Numbers that it does not have are ignored."""
        for number in numbers:
            if (sequence := sequences.pop(number, None)) is not None:
                del self._homes[id(sequence)]
                self.pool.release(sequence.blocks)

    def _needs(self, sequences: Sequences, chunks: Sequence[SequenceChunk], first: int) -> list[int]:
        """The blocks that each of ``chunks`` lacks. Raises as ``place`` for a step that cannot be."""
        needs: list[int] = []
        for chunk in chunks:
            cached = sequences[chunk.number].cached if chunk.number in sequences else 0
            if chunk.start > cached:
                raise MissingTokensError(
                    f"sequence {chunk.number} has {cached} tokens here, and the step begins at {chunk.start}"
                )
            if chunk.start and first < sequences[chunk.number].first:
                raise MissingTokensError(
                    f"sequence {chunk.number} has nothing here of layer {first}, where the step begins"
                )
            if chunk.end > self.context:
                raise RequestError(
                    f"sequence {chunk.number} of {chunk.end} tokens exceeds the context of {self.context}"
                )
            had = len(sequences[chunk.number].blocks) if chunk.number in sequences else 0
            needs.append(max(0, -(-chunk.end // self.block_tokens) - had))
        return needs

    def _sequences_to_evict(
        self, client: Client, keep: Collection[int], blocks: int, new: int
    ) -> list[tuple[int, CachedSequence]]:
        """Sequences, with their numbers, that make room for so many ``blocks`` and ``new`` sequences of ``client``,
        but those with an id in ``keep``. Raises BusyError where there cannot be room."""
        coming = sum(self.pool.owners(block) == steps for block, steps in self._leased.items())
        lacks = {"blocks": blocks - self.pool.free - coming, "sequences": self.held + new - self.sequences}
        if max(lacks.values()) <= 0:
            return []
        now, homes = time.monotonic(), [(number, sequence) for _, number, sequence in self._homes.values()]
        held = {"blocks": Counter[Client](), "sequences": Counter[Client]()}
        for _, sequence in homes:
            held["blocks"][sequence.client] += len(sequence.blocks)
            held["sequences"][sequence.client] += 1
        rest = [home for home in homes if id(home[1]) not in keep]
        rest.sort(key=lambda home: (self._runs(home[1]), home[1].used))  # who was idle longest first
        gone: list[tuple[int, CachedSequence]] = []
        while max(lacks.values()) > 0:
            resource = max(lacks, key=lacks.__getitem__)
            wanted = blocks if resource == "blocks" else new
            yields = client_to_evict(held[resource], client, wanted, [home[1].client for home in rest])
            victim = next((home for home in rest if home[1].client == yields), None)
            if victim is None:
                spare = (home for home in rest if not self._runs(home[1]) and home[1].used + self.spare_s <= now)
                victim = next(spare, None)
            if victim is None:
                raise self._full(resource, [sequence for _, sequence in rest], now)
            rest.remove(victim)
            gone.append(victim)
            lacks["blocks"] -= len(victim[1].blocks)
            lacks["sequences"] -= 1
            held["blocks"][victim[1].client] -= len(victim[1].blocks)
            held["sequences"][victim[1].client] -= 1
        return gone

    def _full(self, resource: str, others: Sequence[CachedSequence], now: float) -> BusyError:
        reason = f"the pool of {self.pool.count * self.block_tokens} tokens is full"
        if resource == "sequences":
            reason = f"{self.held} sequences are open here, and at most {self.sequences} are taken"
        return busy(reason, [sequence.used + self.spare_s - now for sequence in others])

    def _runs(self, sequence: CachedSequence) -> bool:
        """Return whether a step of ``sequence`` is under way."""
        return any(last in self._leased for last in sequence.blocks[-1:])

    def _writes(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        size = self.block_tokens
        return [
            block for chunk in chunks for block in chunk.request.blocks[chunk.start // size : -(-chunk.end // size)]
        ]
