"""Layers that lie on servers, one after the other, whoever of these is alive.

What enters each server is kept (the engine's edges), so that a server that fails is replaced in the middle of a
generation: its successor is sent what it has not seen, which is everything, and answers with the step that was asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.engine.edges import Edges
from firsttoken.study.errors import SwarmError
from firsttoken.swarm.line import Line, ServerFault
from firsttoken.swarm.records import Record
from firsttoken.swarm.swarm import Swarm
from firsttoken.swarm.trust.auditor import Auditor, DoubtFault
from firsttoken.swarm.wire import MOST_TOKENS, Stretch


class Chain:
    """``layers`` on the servers of ``swarm``; hidden states travel in ``coding``, ``auditor`` looks at answers."""

    def __init__(self, swarm: Swarm, layers: range, coding: str, auditor: Auditor | None = None) -> None:
        self.swarm = swarm
        self.layers = layers
        self.coding = coding
        self.auditor = auditor
        self.faults: list[tuple[str, str]] = []  # (subkey, why) of each server that was replaced
        self.heirs: list[list[tuple[Record, range]]] = []  # of each of the faults: who took which blocks over
        self.lines: list[tuple[Line, Record]] = []
        self._edges = Edges(layers)

    @property
    def kept_bytes(self) -> int:
        """Bytes of hidden states that are kept for servers that may fail."""
        return self._edges.nbytes

    async def run(self, stretches: Sequence[Stretch], hidden: Tensor) -> Tensor:
        """``hidden`` [tokens, hidden] of ``stretches``, end to end, after the layers.

        Raises SwarmError when blocks stay unserved or all who serve them fail, RequestError for a step that no server
        would take.
        """
        for one, rows in zip(stretches, hidden.split([one.end - one.start for one in stretches]), strict=True):
            self._edges.keep(one.number, self.layers.start, one.start, rows)
        if not self.lines:
            await self._extend(0, self.layers)
        place, out, failing_s = 0, hidden, None
        while place < len(self.lines):
            try:
                out = await self._through(*self.lines[place], stretches)
            except ServerFault as fault:
                failing_s = failing_s or time.monotonic()
                if time.monotonic() - failing_s > (most := self.swarm.patience.find_s):
                    raise SwarmError(f"{fault} (and who took over failed, too, for {most:g} s)") from fault
                await self._replace(place, fault)
                if isinstance(fault, DoubtFault):  # what it told the servers behind it is told them again by another
                    for line, _ in self.lines[place:]:
                        line.known = dict.fromkeys(line.known, 0)
            else:
                place, failing_s = place + 1, None
        return out

    async def forget(self, numbers: Sequence[int]) -> None:
        """These sequences are over."""
        for number in numbers:
            self._edges.drop(number)
        for line, _ in list(self.lines):
            await line.forget(numbers)

    def close(self) -> None:
        """End all sessions."""
        for line, _ in self.lines:
            line.close()
        self.lines = []

    async def _through(self, line: Line, record: Record, stretches: Sequence[Stretch]) -> Tensor:
        """The step through one server, behind all that it has not seen; what comes out, of the step's tokens."""
        if record.server in self.swarm.convicted:
            raise DoubtFault(f"{record.name} was convicted")
        behind = [Stretch(one.number, min(line.known.get(one.number, 0), one.start), one.end) for one in stretches]
        out: list[list[Tensor]] = [[] for _ in behind]
        places = {one.number: place for place, one in enumerate(behind)}
        for message in messages_of(behind):
            rows = [self._edges.of(one.number, line.layers.start)[0, one.start : one.end] for one in message]
            said = await line.run(message, torch.cat(rows))
            self.swarm.served[record.server] += len(said) * len(line.layers)
            if self.auditor is not None:
                whole = [self._edges.of(one.number, line.layers.start)[0, : one.end] for one in message]
                await self.auditor.look(line, record, message, whole, said)
            for one, part in zip(message, said.split([one.end - one.start for one in message]), strict=True):
                out[places[one.number]].append(part)
                if line.layers.stop != self.layers.stop:
                    self._edges.keep(one.number, line.layers.stop, one.start, part)
        wanted = (one.end - one.start for one in stretches)
        return torch.cat([torch.cat(parts)[-tokens:] for parts, tokens in zip(out, wanted, strict=True)])

    async def _replace(self, place: int, fault: ServerFault) -> None:
        line, record = self.lines.pop(place)
        line.close()
        self.faults.append((record.server, str(fault)))
        self.heirs.append([])
        if fault.lasting:
            self.swarm.ban(record.server)
            await self.swarm.reconnect(record.address)
        self.heirs[-1] = await self._extend(place, line.layers, str(fault))

    async def _extend(self, place: int, layers: range, why: str = "") -> list[tuple[Record, range]]:
        """Put servers of ``layers`` at ``place``; who they are, and for which blocks."""
        swarm = self.swarm
        found = [(record, hop.blocks) for hop, record in await swarm.route(layers, why)]
        self.lines[place:place] = [(swarm.line(record, blocks, self.coding), record) for record, blocks in found]
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
