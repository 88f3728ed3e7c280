"""Layers that lie on servers, one after the other, whoever of these is alive.

What enters each server is kept (the engine's edges), so that a server that fails is replaced in the middle of a
generation: its successor is sent what it has not seen, which is everything, and answers with the step that was asked.

How a sequence begins may have been computed before. Each server keeps blocks of keys and values under names that the
client says: digests of all tokens up to the end of a block, of what else decides them, and of a secret of the client.
A server sees hidden states and could hash these itself; but then a client would have to know what enters the later
servers before it is computed. So the client's word is taken, and can harm nobody else: without its secret the names are
128 bits that cannot be guessed, neither to find a block nor to put another in its place, and each server is told names
of its own, which say nothing to the next. The secret is the owner. All servers of the chain begin behind what all have.
The hidden states of those tokens are then not here, so where a server behind the first is replaced, or does not have
its blocks any more, the sequence is computed from its first token through the whole chain.

Where no successor is found the chain has a gap. Nothing is computed through a chain with a gap: the next step begins by
looking for who serves the blocks that are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.request import KVSource
from firsttoken.petals.messages import MOST_TOKENS, NAMED_TOKENS, SequenceChunk, check_states, end_to_end, split_rows
from firsttoken.petals.records import Record
from firsttoken.petals.routing import check_cover, gaps
from firsttoken.petals.server_session import ServerFault, ServerSession, UnverifiedFault
from firsttoken.petals.swarm import Swarm
from firsttoken.study.errors import CacheError, FirstTokenError, SwarmError

if TYPE_CHECKING:
    from firsttoken.petals.trust.auditor import Auditor


class PrefixKeys(NamedTuple):
    """A sequence of so many ``tokens`` by now, whose full blocks servers may keep and find by ``keys``; ``stored`` are
    keys and values of how it begins, of all layers, for servers that have less of it."""

    tokens: int
    keys: Sequence[bytes]
    stored: KVSource | None = None


class _MissingStatesError(Exception):
    """A server has to be sent hidden states of the sequences ``numbers`` that are not here."""

    def __init__(self, numbers: Collection[int]) -> None:
        super().__init__(numbers)
        self.numbers = numbers


_POLL_S = 0.001  # between two looks whether more of what is stored has come


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
        self.successors: list[list[tuple[Record, range]]] = []  # of each of the faults: who took which blocks over
        self.sessions: list[tuple[ServerSession, Record]] = []
        self.asked_tokens = self.shared_tokens = 0  # of beginnings that servers were asked for, and that they had
        self.restored = 0  # sequences that began with what was stored
        self._hidden_cache = HiddenStateCache(layers)
        self._shared: dict[int, int] = {}  # by sequence: tokens at its beginning that servers had
        self._turn = asyncio.Lock()  # a step that was broken off leaves its sessions before the next one uses them

    @property
    def kept_bytes(self) -> int:
        """Bytes of hidden states that are kept for servers that may fail."""
        return self._hidden_cache.nbytes

    async def run(
        self, chunks: Sequence[SequenceChunk], hidden: Tensor, keyed: Mapping[int, PrefixKeys] = MappingProxyType({})
    ) -> Tensor:
        """Return ``hidden`` [tokens, hidden] of ``chunks``, end to end, after the layers.

        Sequences in ``keyed`` begin with what servers have of them, and leave them theirs; of tokens that servers had,
        zeros are returned. The last token of a sequence is always computed. Raises SwarmError when blocks stay
        unserved, when all servers that have them fail or refuse the step, and for hidden states that no model has, for
        which no server is blamed.
        """
        check_states(hidden)
        async with self._turn:
            for chunk, rows in zip(chunks, split_rows(hidden, chunks), strict=True):
                self._hidden_cache.keep(chunk.number, self.layers.start, chunk.start, rows)
            begun = [chunk.number for chunk in chunks if not chunk.start and chunk.number in keyed]
            if begun:
                await self._reuse({number: keyed[number] for number in begun})
            keys = {number: prefix.keys for number, prefix in keyed.items()}
            try:
                out = await self._unshared(chunks, hidden, keys)
            except _MissingStatesError as missing:  # at most once: all hidden states are here then
                for number in missing.numbers:  # all servers are sent these from their first token on
                    self._shared.pop(number, None)
                    for session, _ in self.sessions:
                        session.known[number] = 0
                out = await self._unshared(chunks, hidden, keys)
        await self._leave_late()
        return out

    def unserved(self) -> list[int]:
        """The layers that no server has which can be asked now. A server of the chain counts as long as it answers."""
        records, lately_s = self.swarm.servers(self._adapter), time.monotonic() - self.swarm.timeouts.refresh_s
        answering = {server_record.server for server_record in records}
        serving = [server_record.span for server_record in records if self.swarm.state(server_record)[0] == "serves"]
        for session, record in list(self.sessions):  # one that computes may be too busy to be looked at
            if session.steps and (record.server in answering or session.answered_s > lately_s):
                serving.append(session.layers)
        return [layer for gap in gaps(serving, self.layers) for layer in gap]

    async def forget(self, numbers: Sequence[int]) -> None:
        """Forget these sequences, which are over."""
        for number in numbers:
            self._hidden_cache.drop(number)
            self._shared.pop(number, None)
        for session, _ in list(self.sessions):
            await session.forget(numbers)

    def close(self) -> None:
        for session, _ in self.sessions:
            session.close()
        self.sessions = []

    async def _reuse(self, new: Mapping[int, PrefixKeys]) -> None:
        """Ask all servers what they have of how these sequences begin, which go on behind what all have."""
        await self._fill_gaps()
        names = {number: prefix.keys[: (prefix.tokens - 1) // NAMED_TOKENS] for number, prefix in new.items()}
        names, sessions = {number: keys for number, keys in names.items() if keys}, list(self.sessions)
        answers: list[dict[int, int] | ServerFault] = [{}] * len(sessions)
        if names:
            answers = await self._all(sessions, (session.reuse(names) for session, _ in sessions))
        complete = not any(isinstance(answer, ServerFault) for answer in answers)
        for number, prefix in new.items():
            had: dict[ServerSession, int] = {}
            if complete:
                had = {session: answer.get(number, 0) for (session, _), answer in zip(sessions, answers, strict=True)}
            self._shared[number] = min(had.values(), default=0)
            self.shared_tokens += self._shared[number]
            if prefix.stored is not None:
                # for the rest alone nothing is sent
                blocks = prefix.stored.tokens - prefix.stored.tokens % NAMED_TOKENS
                if had and not 0 < self._shared[number] >= blocks:
                    end = blocks if any(had.values()) else prefix.stored.tokens  # within no block that others may have
                    self._shared[number] = await self._fill(number, prefix.stored, end, prefix.keys, had)
                self.restored += 0 < self._shared[number] >= blocks
            for session, _ in self.sessions:
                session.known[number] = self._shared[number]
            self.asked_tokens += prefix.tokens

    async def _fill(
        self, number: int, stored: KVSource, end: int, keys: Sequence[bytes], had: Mapping[ServerSession, int]
    ) -> int:
        """Send each server the keys and values of its layers behind the tokens that it ``had``, up to ``end``; return
        how many all have then: those that they had, where what is stored cannot be read or a server fails."""
        least = min(had.values())
        try:
            kv = await asyncio.to_thread(_read, stored, self.layers)
        except FirstTokenError:
            return least
        sessions = [(session, record) for session, record in self.sessions if had[session] < end]
        parts = [
            session.fill(number, had[session], kv[layers.start : layers.stop, ..., had[session] : end, :], keys)
            for session, layers in ((session, session.layers) for session, _ in sessions)
        ]
        answers = await self._all(sessions, parts)
        return min([least if isinstance(answer, ServerFault) else answer for answer in answers])

    async def _all(self, sessions: Sequence[tuple[ServerSession, Record]], requests: Iterable[Awaitable]) -> list:
        """Return the servers' answers to ``requests``, which all go out at once; those that fail are dropped, and their
        fault is the answer."""
        try:
            answers = await asyncio.gather(*requests, return_exceptions=True)
        except BaseException:  # as in ``_run_hop``
            for session, _ in sessions:
                self._close(session)
            raise
        for (session, record), answer in zip(sessions, answers, strict=True):
            if isinstance(answer, ServerFault):
                await self._drop(session, record, answer)
            elif isinstance(answer, BaseException):
                raise answer
        return answers

    async def _unshared(
        self, chunks: Sequence[SequenceChunk], hidden: Tensor, keys: Mapping[int, Sequence[bytes]]
    ) -> Tensor:
        """``hidden`` [tokens, hidden] of ``chunks`` after the layers, and zeros for tokens that servers had."""
        remaining = [
            chunk._replace(start=max(chunk.start, min(self._shared.get(chunk.number, 0), chunk.end)))
            for chunk in chunks
        ]
        if not (computed := [chunk for chunk in remaining if chunk.tokens]):
            return torch.zeros_like(hidden)
        await self._fill_gaps()
        out, through = hidden, []
        while len(through) < len(self.sessions):
            out, layers = await self._run_hop(len(through), computed, keys)
            through.append(layers)
        check_cover(through, self.layers)
        if computed == list(chunks):
            return out
        parts = dict(zip([chunk.number for chunk in computed], split_rows(out, computed), strict=True))
        outputs = torch.zeros_like(hidden)
        for chunk, rows in zip(chunks, split_rows(outputs, chunks), strict=True):
            if (part := parts.get(chunk.number)) is not None:
                rows[-len(part) :] = part
        return outputs

    async def _run_hop(
        self, hop_index: int, chunks: Sequence[SequenceChunk], keys: Mapping[int, Sequence[bytes]]
    ) -> tuple[Tensor, range]:
        """Return the hidden states behind the server at ``hop_index``, or behind its successor where it fails, and
        the layers of that server."""
        most, failing_s, refused = self.swarm.timeouts.find_s, 0.0, set()
        while True:
            session, record = self.sessions[hop_index]
            try:
                return await self._through(session, record, chunks, keys), session.layers
            except _MissingStatesError:
                raise
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
                self.successors[-1] = await self._extend(session.layers, str(fault), failing_s + most, refused)
            except BaseException:  # whoever asked has gone, and the next step would read the answer to this one
                self._close(session)
                raise

    async def _through(
        self,
        session: ServerSession,
        record: Record,
        chunks: Sequence[SequenceChunk],
        keys: Mapping[int, Sequence[bytes]],
    ) -> Tensor:
        """The step through one server, behind all that it has not seen; what comes out, of the step's tokens."""
        if record.server in self.swarm.convicted:
            raise UnverifiedFault(f"{record.name} was convicted")
        behind = [chunk._replace(start=min(session.known.get(chunk.number, 0), chunk.start)) for chunk in chunks]
        layer, cache = session.layers.start, self._hidden_cache
        if lacking := [chunk.number for chunk in behind if not cache.reaches(chunk.number, layer, chunk.start)]:
            raise _MissingStatesError(lacking)
        out: dict[int, list[Tensor]] = {chunk.number: [] for chunk in behind}
        for message in messages_of(behind):
            rows = [cache.of(chunk.number, layer, chunk.start)[0, : chunk.tokens] for chunk in message]
            begun = time.monotonic()
            answer = await session.run(message, end_to_end(rows), keys=keys)
            announced_s = self.swarm.announced_s(record, session.layers, len(answer))
            self.swarm.conduct.took(record.server, time.monotonic() - begun, announced_s)
            self.swarm.served[record.server] += len(answer) * len(session.layers)
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
                    self.successors[-1] = await self._extend(session.layers, str(fault), 0.0)

    async def _drop(self, session: ServerSession, record: Record, fault: ServerFault) -> None:
        """End ``session``, with the server of ``record``, and note its fault; the server is not asked further."""
        self._close(session)
        self.faults.append((record.server, str(fault)))
        self.successors.append([])
        if fault.lasting or self.swarm.conduct.lost(record.server):
            self.swarm.conduct.failed(record.server)
            await self.swarm.reconnect(record.address)

    def _close(self, session: ServerSession) -> None:
        self.sessions = [(open_session, other) for open_session, other in self.sessions if open_session is not session]
        session.close()

    async def _extend(
        self, layers: range, why: str = "", until: float | None = None, refused: Collection[str] = ()
    ) -> list[tuple[Record, range]]:
        """Put servers where the chain lacks ``layers``; who they are, and for which blocks. Raises as ``route``."""
        swarm = self.swarm
        routed = await swarm.route(layers, why, until, refused, self._adapter)
        hops = [(record, hop.blocks) for hop, record in routed]
        sessions = [
            *self.sessions,
            *((swarm.open_session(record, blocks, self.coding, self._adapter), record) for record, blocks in hops),
        ]
        self.sessions = sorted(sessions, key=lambda pair: pair[0].layers.start)
        return hops


def _read(stored: KVSource, layers: range) -> Tensor:
    """Wait for all of ``stored``, [layers, 2, kv_heads, tokens, head_dim]. Raises FirstTokenError where it does not
    come whole."""
    came: dict[int, Tensor] = {}
    try:
        stored.begin()
        while not stored.complete:
            came |= {layer: kv[:, 0, :, : stored.tokens] for layer, kv in stored.arrived()}
            time.sleep(_POLL_S)
    finally:
        stored.close()
    if sorted(came) != list(layers) or len({kv.shape for kv in came.values()}) > 1:
        raise CacheError(f"a stored prefix has layers {sorted(came)} of {len(layers)}; store it again")
    return torch.stack([came[layer] for layer in layers])


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
