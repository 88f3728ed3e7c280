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
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.request import KVSource
from firsttoken.petals.message_headers import NAMED_TOKENS
from firsttoken.petals.records import Record
from firsttoken.petals.routing import check_cover, gaps
from firsttoken.petals.server_call import ServerFault, UnverifiedFault
from firsttoken.petals.server_session import ServerSession
from firsttoken.petals.states import MOST_TOKENS, Stretch, check_states, end_to_end
from firsttoken.petals.swarm import Swarm
from firsttoken.study.errors import CacheError, FirstTokenError, SwarmError


class PrefixKeys(NamedTuple):
    """A sequence of so many ``tokens`` by now, whose full blocks servers may keep and find by ``keys``; ``stored`` are
    keys and values of how it begins, of all layers, for servers that have less of it."""

    tokens: int
    keys: Sequence[bytes]
    stored: KVSource | None = None


class _LackingError(Exception):
    """A server has to be sent hidden states of the sequences ``numbers`` that are not here."""

    def __init__(self, numbers: Collection[int]) -> None:
        super().__init__(numbers)
        self.numbers = numbers


_POLL_S = 0.001  # between two looks whether more of what is stored has come


class AnswerCheck(Protocol):
    """Checks the answers of servers; ``ends`` counts how its checks ended, ``why`` says why the last one showed
    nothing."""

    ends: Counter[str]
    why: str

    async def look(
        self,
        session: ServerSession,
        record: Record,
        message: Sequence[Stretch],
        inputs: Sequence[Tensor],
        outputs: Tensor,
    ) -> None:
        """Perhaps check what the server of ``record`` has ``outputs`` [tokens, hidden] to ``message``, behind the
        ``inputs`` [end, hidden] of each of its sequences. Raises UnverifiedFault for a server that is not to be
        believed."""


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
        self, stretches: Sequence[Stretch], hidden: Tensor, keyed: Mapping[int, PrefixKeys] = MappingProxyType({})
    ) -> Tensor:
        """Return ``hidden`` [tokens, hidden] of ``stretches``, end to end, after the layers.

        Sequences in ``keyed`` begin with what servers have of them, and leave them theirs; of tokens that servers had,
        zeros are returned. The last token of a sequence is always computed. Raises SwarmError when blocks stay
        unserved, when all servers that have them fail or refuse the step, and for hidden states that no model has, for
        which no server is blamed.
        """
        check_states(hidden)
        async with self._turn:
            for stretch, rows in zip(
                stretches, hidden.split([stretch.end - stretch.start for stretch in stretches]), strict=True
            ):
                self._hidden_cache.keep(stretch.number, self.layers.start, stretch.start, rows)
            if new := {
                stretch.number: keyed[stretch.number]
                for stretch in stretches
                if not stretch.start and stretch.number in keyed
            }:
                await self._adopt(new)
            keys = {number: prefix.keys for number, prefix in keyed.items()}
            try:
                out = await self._unshared(stretches, hidden, keys)
            except _LackingError as lacking:  # at most once: all hidden states are here then
                self._begin_anew(lacking.numbers)
                out = await self._unshared(stretches, hidden, keys)
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

    async def _adopt(self, new: Mapping[int, PrefixKeys]) -> None:
        """Ask all servers what they have of how these sequences begin, which go on behind what all have."""
        await self._fill_gaps()
        names = {number: prefix.keys[: (prefix.tokens - 1) // NAMED_TOKENS] for number, prefix in new.items()}
        names, sessions = {number: keys for number, keys in names.items() if keys}, list(self.sessions)
        answers: list[dict[int, int] | ServerFault] = [{}] * len(sessions)
        if names:
            answers = await self._all(sessions, (session.adopt(names) for session, _ in sessions))
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
        except BaseException:  # as in ``_past``
            for session, _ in sessions:
                self._let_go(session)
            raise
        for (session, record), answer in zip(sessions, answers, strict=True):
            if isinstance(answer, ServerFault):
                await self._drop(session, record, answer)
            elif isinstance(answer, BaseException):
                raise answer
        return answers

    def _begin_anew(self, numbers: Collection[int]) -> None:
        """Let all servers be sent these sequences from their first token on."""
        for number in numbers:
            self._shared.pop(number, None)
            for session, _ in self.sessions:
                session.known[number] = 0

    async def _unshared(
        self, stretches: Sequence[Stretch], hidden: Tensor, keys: Mapping[int, Sequence[bytes]]
    ) -> Tensor:
        """``hidden`` [tokens, hidden] of ``stretches`` after the layers, and zeros for tokens that servers had."""
        starts = {stretch.number: min(self._shared.get(stretch.number, 0), stretch.end) for stretch in stretches}
        remaining = [
            Stretch(stretch.number, max(stretch.start, starts[stretch.number]), stretch.end) for stretch in stretches
        ]
        if not (some := [stretch for stretch in remaining if stretch.start < stretch.end]):
            return torch.zeros_like(hidden)
        await self._fill_gaps()
        out, through = hidden, []
        while len(through) < len(self.sessions):
            out, layers = await self._past(len(through), some, keys)
            through.append(layers)
        check_cover(through, self.layers)
        if some == list(stretches):
            return out
        parts, outputs = iter(out.split([stretch.end - stretch.start for stretch in some])), torch.zeros_like(hidden)
        rows = outputs.split([stretch.end - stretch.start for stretch in stretches])
        for stretch, part in zip(remaining, rows, strict=True):
            if stretch.start < stretch.end:
                part[stretch.start - stretch.end :] = next(parts)
        return outputs

    async def _past(
        self, hop_index: int, stretches: Sequence[Stretch], keys: Mapping[int, Sequence[bytes]]
    ) -> tuple[Tensor, range]:
        """Return the hidden states behind the server at ``hop_index``, or behind its successor where it fails, and
        the layers of that server."""
        most, failing_s, refused = self.swarm.timeouts.find_s, 0.0, set()
        while True:
            session, record = self.sessions[hop_index]
            try:
                return await self._through(session, record, stretches, keys), session.layers
            except _LackingError:
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
                self.heirs[-1] = await self._extend(session.layers, str(fault), failing_s + most, refused)
            except BaseException:  # whoever asked has gone, and the next step would read the answer to this one
                self._let_go(session)
                raise

    async def _through(
        self, session: ServerSession, record: Record, stretches: Sequence[Stretch], keys: Mapping[int, Sequence[bytes]]
    ) -> Tensor:
        """The step through one server, behind all that it has not seen; what comes out, of the step's tokens."""
        if record.server in self.swarm.convicted:
            raise UnverifiedFault(f"{record.name} was convicted")
        behind = [
            Stretch(stretch.number, min(session.known.get(stretch.number, 0), stretch.start), stretch.end)
            for stretch in stretches
        ]
        layer, cache = session.layers.start, self._hidden_cache
        if lacking := [stretch.number for stretch in behind if not cache.reaches(stretch.number, layer, stretch.start)]:
            raise _LackingError(lacking)
        out: list[list[Tensor]] = [[] for _ in behind]
        places = {stretch.number: index for index, stretch in enumerate(behind)}
        for message in messages_of(behind):
            rows = [
                cache.of(stretch.number, layer, stretch.start)[0, : stretch.end - stretch.start] for stretch in message
            ]
            begun = time.monotonic()
            answer = await session.run(message, end_to_end(rows), keys=keys)
            announced_s = self.swarm.announced_s(record, session.layers, len(answer))
            self.swarm.conduct.took(record.server, time.monotonic() - begun, announced_s)
            self.swarm.served[record.server] += len(answer) * len(session.layers)
            if self.auditor is not None:
                prefix_states = [cache.of(stretch.number, layer)[0, : stretch.end] for stretch in message]
                await self.auditor.look(session, record, message, prefix_states, answer)
            for stretch, part in zip(
                message, answer.split([stretch.end - stretch.start for stretch in message]), strict=True
            ):
                out[places[stretch.number]].append(part)
                if session.layers.stop != self.layers.stop:
                    cache.keep(stretch.number, session.layers.stop, stretch.start, part)
        wanted = (stretch.end - stretch.start for stretch in stretches)
        return end_to_end([end_to_end(parts)[-tokens:] for parts, tokens in zip(out, wanted, strict=True)])

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
        """End ``session``, with the server of ``record``, and note its fault; the server is not asked further."""
        self._let_go(session)
        self.faults.append((record.server, str(fault)))
        self.heirs.append([])
        if fault.lasting or self.swarm.conduct.lost(record.server):
            self.swarm.conduct.failed(record.server)
            await self.swarm.reconnect(record.address)

    def _let_go(self, session: ServerSession) -> None:
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


def messages_of(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """``stretches`` in as many messages as they need, a sequence's tokens in order."""
    messages: list[list[Stretch]] = [[]]
    room = MOST_TOKENS
    for stretch in stretches:
        start = stretch.start
        while start < stretch.end:
            if not room:
                messages.append([])
                room = MOST_TOKENS
            end = min(stretch.end, start + room)
            messages[-1].append(Stretch(stretch.number, start, end))
            room -= end - start
            start = end
    return messages
