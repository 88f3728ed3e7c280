"""One client's stream to a server: steps come in, each is answered before the next is read."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from firsttoken.study.errors import BusyError, FirstTokenError, RequestError, SwarmError
from firsttoken.study.foreign.faults import shown
from firsttoken.swarm.batcher import Batcher
from firsttoken.swarm.blocks import parse_blocks
from firsttoken.swarm.limits import ServerLimits
from firsttoken.swarm.room import Room, Tenant
from firsttoken.swarm.trust.commitments import Committer
from firsttoken.swarm.trust.places import OFFER, Places
from firsttoken.swarm.wire import CODINGS, VERSION, decode, encode

if TYPE_CHECKING:
    import grpc

HEADERS = ("swarm-version", "swarm-model", "swarm-blocks", "swarm-coding")
"""What a session is opened with, in this order: version of the messages, sha256 of the model, a:b, coding."""

_MOVES = "this server moves to other blocks: ask another"
_LOOK_S = 0.02  # between two looks whether a session is still open


class IdleError(SwarmError):
    """Nothing was heard of a client, or it did not read its answer, for too long."""


class Sessions:
    """The sessions of a server of ``model``, in its ``places``; ``committer`` signs what it computes."""

    def __init__(
        self, batcher: Batcher, model: str, limits: ServerLimits, committer: Committer, places: Places
    ) -> None:
        stack = batcher.stack
        self.batcher = batcher
        self.model = model
        self.limits = limits
        self.committer = committer
        self.places = places
        self.room = Room(stack.pool.blocks, stack.pool.shape.block_tokens, limits.sequences, stack.context)
        self.ends: Counter[str] = Counter()  # how often a session ended for which reason
        self.moving = False  # to other blocks: no session is opened
        self._ended = False  # those that are open end
        self._awaited: set[asyncio.Timeout] = set()  # what clients are waited for

    @property
    def open(self) -> int:
        """How many there are."""
        return self.places.taken

    async def serve(self, context: grpc.aio.ServicerContext, headers: dict[str, str]) -> None:
        """Answer a client until it goes. Raises SwarmError for a session of another model, version or blocks, and what
        its steps raise; its sequences are gone then."""
        try:
            layers, coding = self.opened(headers)
            await self.places.take(headers.get(OFFER, ""))
        except FirstTokenError:
            with suppress(IdleError):  # a client that is still sending would not hear why
                await self.within(context.read(), "said nothing")
            raise
        mine: dict[int, Tenant] = {}
        try:
            while await self._step(context, mine, layers, coding):
                pass
            self.ends["left"] += 1
        except BaseException as error:
            self.ends[type(error).__name__] += 1
            raise
        finally:
            self.room.leave(mine, list(mine))
            self.places.give()

    async def _step(
        self, context: grpc.aio.ServicerContext, mine: dict[int, Tenant], layers: range, coding: str
    ) -> bool:
        """Read a message and answer it; False when the client has gone."""
        import grpc

        data = await self.within(context.read(), "said nothing")
        if data is grpc.aio.EOF:
            return False
        stack = self.batcher.stack
        try:
            message = decode(data, coding, stack.width, stack.dtype)
        except SwarmError as error:  # no server would take it
            raise RequestError(str(error)) from error
        self.room.leave(mine, message.over)
        if message.hidden is None:
            return True
        if message.first and message.first not in layers:
            raise RequestError(f"layer {message.first} is not among the session's [{layers.start}, {layers.stop})")
        layers = range(message.first or layers.start, layers.stop)
        works = self.room.place(mine, message.stretches, layers.start)
        out = await self.batcher.run(layers, works, message.hidden)
        self.room.computed(mine, message.stretches)
        commitment = ""
        if stack.dtype is CODINGS[coding] is torch.float32:  # what is rounded on the way is not what was computed
            trails = [mine[one.number].trail for one in message.stretches]
            commitment = self.committer.commit(layers, trails, message.stretches, message.hidden, out)
        await self.within(context.write(encode(out, coding, commitment=commitment)), "did not read its answer")
        return True

    async def drain(self, seconds: float) -> None:
        """Open no more sessions until ``moving`` is undone, and end those that are open after so many ``seconds``."""
        self.moving, loop = True, asyncio.get_running_loop()
        self.places.dismiss(BusyError(_MOVES))
        until = loop.time() + seconds
        while self.open:
            if loop.time() > until:
                self._ended = True
                for limit in self._awaited:
                    if not limit.expired():
                        limit.reschedule(loop.time())
            await asyncio.sleep(_LOOK_S)
        self._ended = False

    async def within(self, awaited, what: str):
        """What is awaited of a client. Raises IdleError, with ``what`` it did, when that takes too long, SwarmError
        when the server moves and has waited enough."""
        limit = asyncio.timeout(0 if self._ended else self.limits.idle_s)
        self._awaited.add(limit)
        try:
            async with limit:
                return await awaited
        except TimeoutError:
            if self._ended:
                raise SwarmError(_MOVES) from None
            raise IdleError(f"the client {what} for {self.limits.idle_s:g} s; open a session again") from None
        finally:
            self._awaited.discard(limit)

    def opened(self, headers: dict[str, str]) -> tuple[range, str]:
        """Blocks and coding that a call asks for. Raises SwarmError and RequestError for what is not here."""
        version, model, blocks, coding = (headers.get(name, "") for name in HEADERS)
        held = self.batcher.stack.blocks
        if self.moving:
            raise SwarmError(_MOVES)
        if version != VERSION:
            raise SwarmError(f"this server speaks version {VERSION} of the swarm's messages, not {shown(version)}")
        if model != self.model:
            raise SwarmError(f"this server has blocks of the model {self.model[:12]}, not of {shown(model, 16)}")
        layers = parse_blocks(blocks, held.stop)
        if layers.start < held.start:
            raise SwarmError(f"this server has blocks [{held.start}, {held.stop}), not [{layers.start}, {layers.stop})")
        if coding not in CODINGS:
            raise RequestError(f"no coding is called {shown(coding)}; known: {', '.join(CODINGS)}")
        return layers, coding
