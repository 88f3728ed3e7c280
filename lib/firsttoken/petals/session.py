"""One client's stream to a server: steps come in, each is answered before the next is read. And what a server gives to
all of its clients together, and for how long; the share of each is fair (``fairness``)."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from firsttoken.petals.batcher import Batcher
from firsttoken.petals.checkpoint_blocks import parse_blocks
from firsttoken.petals.fairness import CancelScope, Client, busy, client_of, client_to_evict
from firsttoken.petals.kv_slots import MissingTokensError, Sequences
from firsttoken.petals.messages import ADAPTER, HEADERS, VERSION, check_states
from firsttoken.petals.routing import span_names
from firsttoken.petals.trust.commitments import Committer
from firsttoken.petals.wire import CODINGS, decode, encode
from firsttoken.study.errors import FirstTokenError, RequestError, SwarmError
from firsttoken.study.parsing.parse_errors import shown

if TYPE_CHECKING:
    import grpc

Received = TypeVar("Received")

_MOVES = "this server moves to other blocks: ask another"
_POLL_S = 0.02  # between two looks whether a session is still open
_MOST_SILENT = 1024  # messages without a step in a row; a client has as many sequences to end at most


class IdleClientError(SwarmError):
    """Nothing was heard of a client, or it did not read its answer, for too long."""


@dataclass(frozen=True)
class ServerLimits:
    """``sessions`` are open at most, and ``sequences`` in all of them, with keys and values of ``kv_tokens`` tokens; a
    batch has ``batch_tokens``. A session of which nothing is computed, or whose answer is not read, for ``idle_s``
    seconds is ended. One, or a sequence, of which nothing was computed for ``spare_s`` seconds is given up where
    another lacks room. A record is renewed three times in the ``expiry_s`` seconds that it lives. One that may move
    looks every ``rebalance_s`` whether it should; sessions have ``drain_s`` to end then. Raises SwarmError for what is
    below 1, or no time."""

    sessions: int = 64
    sequences: int = 256
    kv_tokens: int = 16384
    batch_tokens: int = 1024
    idle_s: float = 60.0
    spare_s: float = 5.0
    expiry_s: float = 30.0
    rebalance_s: float = 120.0
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("sessions", "sequences", "kv_tokens", "batch_tokens"):
            if getattr(self, name) < 1:
                raise SwarmError(f"a server's {name} must be at least 1, not {getattr(self, name)}")
        for name in ("idle_s", "spare_s", "expiry_s", "rebalance_s", "drain_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise SwarmError(f"a server's {name} must be seconds above 0, not {getattr(self, name)}")


@dataclass(eq=False)
class Session(CancelScope):
    """One stream of ``client``, for ``layers`` in ``coding`` with the ``adapter``, and its sequences. ``used`` is when
    it was opened or something was computed for it last; ``busy`` while its client waits for a step, ``silent`` messages
    came since."""

    client: Client
    layers: range
    coding: str
    adapter: str
    used: float
    sequences: Sequences = field(default_factory=dict)
    computed: bool = False
    busy: bool = False
    silent: int = 0


class Sessions:
    """The sessions of a server of ``model``; ``committer`` signs what it computes.

    Where no place is free, a session of a client that has more than its share makes way for another's, one without a
    computed token first, and else one of which nothing was computed for a while.
    """

    def __init__(self, batcher: Batcher, model: str, limits: ServerLimits, committer: Committer) -> None:
        self.batcher = batcher
        self.model = model
        self.limits = limits
        self.committer = committer
        self.slots = batcher.slots
        self.ends: Counter[str] = Counter()  # how often a session ended for which reason
        self.moving = False  # to other blocks: no session is opened
        self._open: list[Session] = []
        self._refused = 0  # and still listened to

    @property
    def open(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    async def serve(self, context: grpc.aio.ServicerContext, headers: dict[str, str]) -> None:
        """Answer a client until it goes. Raises SwarmError for a session of another model, version or blocks, and what
        its steps raise; its sequences are gone then."""
        try:
            session = Session(
                client_of(context.peer()), *self.parse_headers(headers), asyncio.get_running_loop().time()
            )
            self.free_place(session.client)
        except FirstTokenError:
            if self._refused < self.limits.sessions:  # how many are listened to at once: each may send a message
                self._refused += 1
                try:
                    with suppress(IdleClientError):  # a client that is still sending would not hear why
                        await self.within_limit(context.read(), "said nothing")
                finally:
                    self._refused -= 1
            raise
        self._open.append(session)
        try:
            with session:
                while await self._step(context, session):
                    pass
            self.ends["left"] += 1
        except BaseException as error:
            self.ends[type(error).__name__] += 1
            raise
        finally:
            self._close(session)

    def free_place(self, client: Client) -> None:
        """End the session that makes way where no place is free for ``client``. Raises BusyError where none does."""
        if self.open < self.limits.sessions:
            return
        if (session := self._session_to_evict(client)) is None:
            now = asyncio.get_running_loop().time()
            idle_s = [0.0 if session.busy else now - session.used for session in self._open]
            spare = [self.limits.spare_s - seconds for seconds in idle_s]
            raise busy(f"{self.open} sessions are open here, and no more are taken", spare)
        session.cancel(MissingTokensError("another client lacks a place here: open a session again"))
        self._close(session)  # its place is free now; what it has under way ends by itself

    def _session_to_evict(self, client: Client) -> Session | None:
        held, now = Counter(session.client for session in self._open), asyncio.get_running_loop().time()
        longest = sorted(self._open, key=lambda session: (session.busy, session.used))
        unused = [session for session in longest if not session.busy and not session.computed]
        idle = [session for session in longest if not session.busy and session.used + self.limits.spare_s <= now]
        for some, wanted in ((unused, 0), (longest, 1)):  # of two that have as much, who uses nothing has too much
            yields = client_to_evict(held, client, wanted, [session.client for session in some])
            if yields is not None:
                return next(session for session in some if session.client == yields)
        return idle[0] if idle else None

    def _close(self, session: Session) -> None:
        """End a session; its sequences and its place are free, if they have not been before."""
        if session in self._open:
            self._open.remove(session)
            self.slots.free(session.sequences, list(session.sequences))

    async def _step(self, context: grpc.aio.ServicerContext, session: Session) -> bool:
        """Read a message and answer it; False when the client has gone."""
        import grpc

        data = await self.within_limit(context.read(), "said nothing", session.used)
        if data is grpc.aio.EOF:
            return False
        backend, layers, sequences = self.batcher.backend, session.layers, session.sequences
        try:
            message = decode(data, session.coding, backend.width, backend.dtype)
        except SwarmError as error:  # no server would take it
            raise RequestError(str(error)) from error
        self.slots.free(sequences, message.over)
        if message.hidden is None:
            session.silent += 1
            if session.silent > _MOST_SILENT:
                raise RequestError(f"{session.silent} messages came without a step: send steps, or end the session")
            return True
        if message.first and message.first not in layers:
            raise RequestError(f"layer {message.first} is not among the session's [{layers.start}, {layers.stop})")
        layers = range(message.first or layers.start, layers.stop)
        session.busy, session.silent = True, 0
        scheduled = await self.slots.placed(sequences, message.chunks, layers.start, session.client)
        # a sequence may make room meanwhile
        trails = [sequences[chunk.number].trail for chunk in message.chunks]
        out = await self.batcher.run(layers, scheduled, message.hidden, session.client, session.adapter)
        check_states(out, "the hidden states that come out of these blocks hold")
        self.slots.computed(sequences, message.chunks)
        session.busy, session.computed, session.used = False, True, asyncio.get_running_loop().time()
        commitment = ""
        # What is rounded on the way was not computed, and who judges has the model alone.
        if backend.dtype is CODINGS[session.coding] is torch.float32 and not session.adapter:
            commitment = self.committer.commit(layers, trails, message.chunks, message.hidden, out)
        answer = encode(out, session.coding, commitment=commitment)
        await self.within_limit(context.write(answer), "did not read its answer")
        return True

    async def drain(self, seconds: float) -> None:
        """Open no more sessions until ``moving`` is undone, and end those that are open after so many ``seconds``."""
        self.moving, loop = True, asyncio.get_running_loop()
        until = loop.time() + seconds
        while self.open:
            if loop.time() > until:
                for session in self._open:
                    session.cancel(SwarmError(_MOVES))
            await asyncio.sleep(_POLL_S)

    async def within_limit(self, awaited: Awaitable[Received], subject: str, since: float | None = None) -> Received:
        """Return what is ``awaited`` of a client. Raises IdleClientError, which says ``subject`` of the client, when
        ``idle_s`` seconds have passed ``since`` then (by the loop's clock; None: now)."""
        begun = asyncio.get_running_loop().time() if since is None else since
        try:
            async with asyncio.timeout_at(begun + self.limits.idle_s):
                return await awaited
        except TimeoutError:
            raise IdleClientError(f"the client {subject} for {self.limits.idle_s:g} s; open a session again") from None

    def parse_headers(self, headers: dict[str, str]) -> tuple[range, str, str]:
        """The blocks, coding and adapter that a call asks for. Raises SwarmError and RequestError for what is not
        here."""
        version, model, blocks, coding, adapter = (headers.get(name, "") for name in (*HEADERS, ADAPTER))
        backend = self.batcher.backend
        if self.moving:
            raise SwarmError(_MOVES)
        if version != VERSION:
            raise SwarmError(f"this server speaks version {VERSION} of the swarm's messages, not {shown(version)}")
        if model != self.model:
            raise SwarmError(f"this server has blocks of the model {self.model[:12]}, not of {shown(model, 16)}")
        layers = parse_blocks(blocks, backend.blocks.stop)
        if layers.start < backend.blocks.start:
            raise SwarmError(f"this server has blocks {span_names([backend.blocks])}, not {span_names([layers])}")
        if coding not in CODINGS:
            raise RequestError(f"no coding is called {shown(coding)}; known: {', '.join(CODINGS)}")
        if adapter and adapter not in backend.adapters:
            raise SwarmError(f"this server has no adapter {shown(adapter, 80)}: ask one that announces it")
        return layers, coding, adapter
