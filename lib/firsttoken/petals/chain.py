"""Layers that lie on servers, one after the other, whoever of these is alive.

What enters each server is kept (the engine's edges), so that a server that fails is replaced in the middle of a
generation: its successor is sent what it has not seen, which is everything, and answers with the step that was asked.
Where no successor is found the chain has a gap. Nothing is computed through a chain with a gap: the next step begins by
looking for who serves the blocks that are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.petals.records import Record
from firsttoken.petals.routing import check_cover, gaps
from firsttoken.petals.server_session import DoubtFault, ServerFault, ServerSession
from firsttoken.petals.states import MOST_TOKENS, Stretch, check_states
from firsttoken.petals.swarm import Swarm
from firsttoken.study.errors import SwarmError


class AnswerCheck(Protocol):
    """What looks at the answers of servers; ``ends`` counts how its checks ended, ``why`` the last one showed
    nothing."""

    ends: Counter[str]
    why: str

    async def look(
        self, session: ServerSession, record: Record, message: Sequence[Stretch], inputs: Sequence[Tensor], said: Tensor
    ) -> None:
        """Perhaps check what the server of ``record`` has ``said`` [tokens, hidden] to ``message``, behind the
        ``inputs`` [end, hidden] of each of its sequences. Raises DoubtFault for a server that is not to be believed."""


class Chain:
    """``layers`` on the servers of ``swarm`` that have the ``adapter`` ("": none is asked for); hidden states travel in
    ``coding``, ``auditor`` looks at answers."""

    def __init__(
        self, swarm: Swarm, layers: range, coding: str, auditor: AnswerCheck | None = None, adapter: str = ""
    ) -> None:
        self.swarm = swarm
        self.layers = layers
        self.coding, self._adapter = coding, adapter
        self.auditor = auditor
        self.faults: list[tuple[str, str]] = []  # (subkey, why) of each server that was replaced
        self.heirs: list[list[tuple[Record, range]]] = []  # of each of the faults: who took which blocks over
        self.sessions: list[tuple[ServerSession, Record]] = []
        self._hidden_cache = HiddenStateCache(layers)
        self._turn = asyncio.Lock()  # a step that was broken off leaves its sessions before the next one uses them

    @property
    def kept_bytes(self) -> int:
        """Bytes of hidden states that are kept for servers that may fail."""
        return self._hidden_cache.nbytes

    async def run(self, stretches: Sequence[Stretch], hidden: Tensor) -> Tensor:
        """Return ``hidden`` [tokens, hidden] of ``stretches``, end to end, after the layers.

        Raises SwarmError when blocks stay unserved, when all servers that have them fail or refuse the step, and for
        hidden states that no model has, for which no server is blamed.
        """
        check_states(hidden)
        async with self._turn:
            for one, rows in zip(stretches, hidden.split([one.end - one.start for one in stretches]), strict=True):
                self._hidden_cache.keep(one.number, self.layers.start, one.start, rows)
            await self._fill_gaps()
            out, through = hidden, []
            while len(through) < len(self.sessions):
                out, layers = await self._past(len(through), stretches)
                through.append(layers)
            check_cover(through, self.layers)
        await self._leave_late()
        return out

    def unserved(self) -> list[int]:
        """The layers that no server has which can be asked now. A server of the chain counts as long as it answers."""
        known, lately_s = self.swarm.servers(self._adapter), time.monotonic() - self.swarm.timeouts.refresh_s
        answering = {one.server for one in known}
        serving = [one.span for one in known if self.swarm.state(one)[0] == "serves"]
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
        """End all sessions."""
        for session, _ in self.sessions:
            session.close()
        self.sessions = []

    async def _past(self, place: int, stretches: Sequence[Stretch]) -> tuple[Tensor, range]:
        """What comes out behind the server at ``place``, or whoever has to replace it, and the layers of that one."""
        most, failing_s, refused = self.swarm.timeouts.find_s, 0.0, set()
        while True:
            session, record = self.sessions[place]
            try:
                return await self._through(session, record, stretches), session.layers
            except ServerFault as fault:
                failing_s = failing_s or time.monotonic()
                refused |= {record.server} if fault.refused else set()
                await self._drop(session, record, fault)
                if isinstance(fault, DoubtFault):  # what it told the servers behind it is told them again by another
                    for behind, _ in self.sessions[place:]:
                        behind.known = dict.fromkeys(behind.known, 0)
                if time.monotonic() - failing_s > most:
                    raise SwarmError(f"{fault} (the servers that took over failed too, for {most:g} s)") from fault
                self.heirs[-1] = await self._extend(session.layers, str(fault), failing_s + most, refused)
            except BaseException:  # whoever asked has gone, and the next step would read the answer to this one
                self._let_go(session)
                raise

    async def _through(self, session: ServerSession, record: Record, stretches: Sequence[Stretch]) -> Tensor:
        """The step through one server, behind all that it has not seen; what comes out, of the step's tokens."""
        if record.server in self.swarm.convicted:
            raise DoubtFault(f"{record.name} was convicted")
        behind = [Stretch(one.number, min(session.known.get(one.number, 0), one.start), one.end) for one in stretches]
        out: list[list[Tensor]] = [[] for _ in behind]
        places = {one.number: place for place, one in enumerate(behind)}
        for message in messages_of(behind):
            rows = [self._hidden_cache.of(one.number, session.layers.start)[0, one.start : one.end] for one in message]
            begun = time.monotonic()
            said = await session.run(message, torch.cat(rows))
            announced_s = self.swarm.announced_s(record, session.layers, len(said))
            self.swarm.conduct.took(record.server, time.monotonic() - begun, announced_s)
            self.swarm.served[record.server] += len(said) * len(session.layers)
            if self.auditor is not None:
                whole = [self._hidden_cache.of(one.number, session.layers.start)[0, : one.end] for one in message]
                await self.auditor.look(session, record, message, whole, said)
            for one, part in zip(message, said.split([one.end - one.start for one in message]), strict=True):
                out[places[one.number]].append(part)
                if session.layers.stop != self.layers.stop:
                    self._hidden_cache.keep(one.number, session.layers.stop, one.start, part)
        wanted = (one.end - one.start for one in stretches)
        return torch.cat([torch.cat(parts)[-tokens:] for parts, tokens in zip(out, wanted, strict=True)])

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
                    self.heirs[-1] = await self._extend(session.layers, str(fault), 0.0)

    async def _drop(self, session: ServerSession, record: Record, fault: ServerFault) -> None:
        """The server of ``session``, which is that of ``record``, is not asked further."""
        self._let_go(session)
        self.faults.append((record.server, str(fault)))
        self.heirs.append([])
        if fault.lasting or self.swarm.conduct.lost(record.server):
            self.swarm.conduct.failed(record.server)
            await self.swarm.reconnect(record.address)

    def _let_go(self, session: ServerSession) -> None:
        self.sessions = [(one, other) for one, other in self.sessions if one is not session]
        session.close()

    async def _extend(
        self, layers: range, why: str = "", until: float | None = None, refused: Collection[str] = ()
    ) -> list[tuple[Record, range]]:
        """Put servers where the chain lacks ``layers``; who they are, and for which blocks. Raises as ``route``."""
        swarm = self.swarm
        routed = await swarm.route(layers, why, until, refused, self._adapter)
        found = [(record, hop.blocks) for hop, record in routed]
        sessions = [
            *self.sessions,
            *((swarm.open_session(record, blocks, self.coding, self._adapter), record) for record, blocks in found),
        ]
        self.sessions = sorted(sessions, key=lambda one: one[0].layers.start)
        return found


def messages_of(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """``stretches`` in as many messages as they need, a sequence's tokens in order."""
    messages: list[list[Stretch]] = [[]]
    room = MOST_TOKENS
    for one in stretches:
        start = one.start
        while start < one.end:
            if not room:
                messages.append([])
                room = MOST_TOKENS
            end = min(one.end, start + room)
            messages[-1].append(Stretch(one.number, start, end))
            room -= end - start
            start = end
    return messages
