"""Layers that lie on servers, one after the other, whoever of these is alive.

What enters each server is kept (the engine's edges), so that a server that fails is replaced in the middle of a
generation: its successor is sent what it has not seen, which is everything, and answers with the step that was asked.

Where no successor is found the chain has a gap. Nothing is computed through a chain with a gap: the next step begins by
looking for who serves the blocks that are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor

from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.petals.messages import MOST_TOKENS, SequenceChunk, check_states, end_to_end, split_rows
from firsttoken.petals.records import Record
from firsttoken.petals.routing import check_cover, gaps
from firsttoken.petals.server_session import ServerFault, ServerSession, UnverifiedFault
from firsttoken.petals.swarm import Swarm
from firsttoken.study.errors import SwarmError

if TYPE_CHECKING:
    from firsttoken.petals.trust.auditor import Auditor


class Chain:
    """``layers`` on the servers of ``swarm`` that have the ``adapter`` ("": none is asked for); hidden states travel in
    ``coding``, ``auditor`` looks at answers."""

    def __init__(
        self, swarm: Swarm, layers: range, coding: str, auditor: Auditor | None = None, adapter: str = ""
    ) -> None:
        self.swarm = swarm
        self.layers = layers
        self.coding, self._adapter = coding, adapter
        self.auditor = auditor
        self.faults: list[tuple[str, str]] = []  # (subkey, why) of each server that was replaced
        self.sessions: list[tuple[ServerSession, Record]] = []
        self._hidden_cache = HiddenStateCache(layers)
        self._turn = asyncio.Lock()  # a step that was broken off leaves its sessions before the next one uses them

    async def run(self, chunks: Sequence[SequenceChunk], hidden: Tensor) -> Tensor:
        """Return ``hidden`` [tokens, hidden] of ``chunks``, end to end, after the layers.

        Raises SwarmError when blocks stay unserved, when all servers that have them fail or refuse the step, and for
        hidden states that no model has, for which no server is blamed.
        """
        check_states(hidden)
        async with self._turn:
            for chunk, rows in zip(chunks, split_rows(hidden, chunks), strict=True):
                self._hidden_cache.keep(chunk.number, self.layers.start, chunk.start, rows)
            await self._fill_gaps()
            out, through = hidden, []
            while len(through) < len(self.sessions):
                out, layers = await self._run_hop(len(through), chunks)
                through.append(layers)
            check_cover(through, self.layers)
        await self._leave_late()
        return out

    def unserved(self) -> list[int]:
        """The layers that no server has which can be asked now. A server of the chain counts as long as it answers."""
        records, lately_s = self.swarm.servers(self._adapter), time.monotonic() - self.swarm.timeouts.refresh_s
        answering = {server_record.server for server_record in records}
        shunned = self.swarm.conduct.shunned()
        serving = [server_record.span for server_record in records if server_record.server not in shunned]
        for session, record in list(self.sessions):  # one that computes may be too busy to be looked at
            if session.steps and (record.server in answering or session.answered_s > lately_s):
                serving.append(session.layers)
        return [layer for gap in gaps(serving, self.layers) for layer in gap]

    async def forget(self, numbers: Sequence[int]) -> None:
        """Forget these sequences, which are over."""
        for number in numbers:
            self._hidden_cache.drop(number)
        for session, _ in list(self.sessions):
            await session.forget(numbers)

    def close(self) -> None:
        for session, _ in self.sessions:
            session.close()
        self.sessions = []

    async def _run_hop(self, hop_index: int, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, range]:
        """Return the hidden states behind the server at ``hop_index``, or behind its successor where it fails, and
        the layers of that server."""
        most, failing_s, refused = self.swarm.timeouts.find_s, 0.0, set()
        while True:
            session, record = self.sessions[hop_index]
            try:
                return await self._through(session, record, chunks), session.layers
            except ServerFault as fault:
                failing_s = failing_s or time.monotonic()
                refused |= {record.server} if fault.refused else set()
                await self._drop(session, record, fault)
                # what it told the servers behind it is told them again by another
                if isinstance(fault, UnverifiedFault):
                    for behind, _ in self.sessions[hop_index:]:
                        behind.known = dict.fromkeys(behind.known, 0)
                if time.monotonic() - failing_s > most:
                    raise SwarmError(f"{fault} (the servers that took over failed too, for {most:g} s)") from fault
                await self._extend(session.layers, str(fault), failing_s + most, refused)
            except BaseException:  # whoever asked has gone, and the next step would read the answer to this one
                self._close(session)
                raise

    async def _through(self, session: ServerSession, record: Record, chunks: Sequence[SequenceChunk]) -> Tensor:
        """The step through one server, behind all that it has not seen; what comes out, of the step's tokens."""
        if record.server in self.swarm.convicted:
            raise UnverifiedFault(f"{record.name} was convicted")
        behind = [chunk._replace(start=min(session.known.get(chunk.number, 0), chunk.start)) for chunk in chunks]
        layer, cache = session.layers.start, self._hidden_cache
        out: dict[int, list[Tensor]] = {chunk.number: [] for chunk in behind}
        for message in messages_of(behind):
            rows = [cache.of(chunk.number, layer, chunk.start)[0, : chunk.tokens] for chunk in message]
            begun = time.monotonic()
            answer = await session.run(message, end_to_end(rows))
            announced_s = self.swarm.announced_s(record, session.layers, len(answer))
            self.swarm.conduct.took(record.server, time.monotonic() - begun, announced_s)
            if self.auditor is not None:
                prefix_states = [cache.of(chunk.number, layer)[0, : chunk.end] for chunk in message]
                await self.auditor.audit(session, record, message, prefix_states, answer)
            for chunk, part in zip(message, split_rows(answer, message), strict=True):
                out[chunk.number].append(part)
                if session.layers.stop != self.layers.stop:
                    cache.keep(chunk.number, session.layers.stop, chunk.start, part)
        return end_to_end([end_to_end(out[chunk.number])[-chunk.tokens :] for chunk in chunks])

    async def _fill_gaps(self) -> None:
        """Put servers where the chain has none: at first everywhere, later where one was lost without a successor."""
        for gap in gaps([session.layers for session, _ in self.sessions], self.layers):
            await self._extend(gap)
        check_cover([session.layers for session, _ in self.sessions], self.layers)

    async def _leave_late(self) -> None:
        """Leave servers that are late again and again, where others are several times as fast."""
        for session, record in list(self.sessions):
            if self.swarm.faster(record, session.layers, self._adapter):
                late_s = self.swarm.conduct.late_s(record.server)
                fault = ServerFault(f"{record.name} is {late_s:.2f} s later than it announced")
                await self._drop(session, record, fault)
                with suppress(SwarmError):  # the step is done, and the next one looks for longer
                    await self._extend(session.layers, str(fault), 0.0)

    async def _drop(self, session: ServerSession, record: Record, fault: ServerFault) -> None:
        """End ``session``, with the server of ``record``, and note its fault; the server is not asked further."""
        self._close(session)
        self.faults.append((record.server, str(fault)))
        if fault.lasting or self.swarm.conduct.lost(record.server):
            self.swarm.conduct.failed(record.server)
            await self.swarm.reconnect(record.address)

    def _close(self, session: ServerSession) -> None:
        self.sessions = [(open_session, other) for open_session, other in self.sessions if open_session is not session]
        session.close()

    async def _extend(
        self, layers: range, why: str = "", until: float | None = None, refused: Collection[str] = ()
    ) -> None:
        """Put servers where the chain lacks ``layers``. Raises as ``route``."""
        swarm, adapter = self.swarm, self._adapter
        routed = await swarm.route(layers, why, until, refused, adapter)
        new = [(swarm.open_session(record, hop.blocks, self.coding, adapter), record) for hop, record in routed]
        self.sessions = sorted([*self.sessions, *new], key=lambda pair: pair[0].layers.start)


def messages_of(chunks: Sequence[SequenceChunk]) -> list[list[SequenceChunk]]:
    """``chunks`` in as many messages as they need, a sequence's tokens in order."""
    messages: list[list[SequenceChunk]] = [[]]
    room = MOST_TOKENS
    for chunk in chunks:
        start = chunk.start
        while start < chunk.end:
            if not room:
                messages.append([])
                room = MOST_TOKENS
            end = min(chunk.end, start + room)
            messages[-1].append(SequenceChunk(chunk.number, start, end))
            room -= end - start
            start = end
    return messages
