"""Work never outlives the ownership of what it writes: steps of sessions that end while they wait or are computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc
import pytest
import torch

from firsttoken.swarm.background import wait_for
from firsttoken.swarm.room import Room
from firsttoken.swarm.service import SESSION
from firsttoken.swarm.session import HEADERS
from firsttoken.swarm.stack import BlockStack
from firsttoken.swarm.wire import Stretch, decode, encode

WIDTH = 32


def rows(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed * 1000 + tokens))


class Talking:
    """One session with a server, whose steps can be sent and read apart."""

    def __init__(self, channel: grpc.aio.Channel, model: str) -> None:
        given = tuple(zip(HEADERS, ("1", model, "0:6", "float32"), strict=True))
        self.call = channel.stream_stream(SESSION)(metadata=given)

    async def send(self, start: int, end: int, *, first: int = 0, number: int = 0) -> None:
        said = encode(rows(end - start, start), "float32", [Stretch(number, start, end)], first=first)
        await self.call.write(said)

    async def read(self, tokens: int) -> torch.Tensor:
        return decode(await self.call.read(), "float32", WIDTH, torch.float32, tokens).hidden

    async def step(self, start: int, end: int, **options: int) -> torch.Tensor:
        await self.send(start, end, **options)
        return await self.read(end - start)


@pytest.fixture
def alone(folder) -> torch.Tensor:
    """What the blocks say to tokens [0, 32) and then to [32, 33) of one sequence, with nobody else about."""
    stack = BlockStack(folder, range(6), torch.float32, 64)
    room, mine, out = Room(stack.pool.blocks, stack.pool.shape.block_tokens, 1, stack.context), {}, []
    for start, end in ((0, 32), (32, 33)):
        works = room.place(mine, [Stretch(0, start, end)])
        out += stack.run(range(6), works, [rows(end - start, start)])
        room.computed(mine, [Stretch(0, start, end)])
    return torch.cat(out)


@pytest.fixture
def held(here):
    """A server whose thread waits until it is let go."""
    server, go = here.serve((0, 6), limits={"kv_tokens": 128, "idle_s": 30.0})[0], threading.Event()
    yield server, go
    go.set()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():
            await asyncio.sleep(0.002)


async def shut_while(server, go: threading.Event, talk: Callable[[], Awaitable[None]]) -> None:
    """``talk`` while nothing is computed; then everything is."""
    go.clear()
    blocked = asyncio.create_task(server.sessions.batcher.aside(lambda: go.wait(30)))
    try:
        await talk()
    finally:
        go.set()
        await blocked


def waiting(server) -> int:
    return len(server.sessions.batcher._waiting)


@pytest.mark.parametrize("goes", ["cancelled", "connection closed"])
def test_a_step_that_was_cancelled_writes_nothing_into_blocks_of_others(here, held, alone, goes):
    """Steps through a part of the blocks wait behind those through all of them, which are computed together."""
    server, go = held
    room = server.sessions.room

    async def run() -> torch.Tensor:
        async with (
            grpc.aio.insecure_channel(server.record.address) as channel,
            grpc.aio.insecure_channel(server.record.address) as other,
        ):
            one, two, victim = (Talking(channel, here.model) for _ in range(3))
            gone = Talking(other, here.model)
            first = []

            async def talk() -> None:
                await one.send(0, 1)  # goes to the thread alone
                await until(lambda: room.held == 1 and not waiting(server))
                await two.send(0, 1)
                await until(lambda: waiting(server) == 1)
                await gone.send(0, 33, first=3)
                await until(lambda: waiting(server) == 2)
                gone.call.cancel() if goes == "cancelled" else await other.close()
                with suppress(asyncio.CancelledError):
                    await gone.call.code()
                await until(lambda: server.sessions.open == 3)
                await victim.send(0, 32)  # into the blocks that have come free, together with ``two``
                await until(lambda: room.held == 3)

            await shut_while(server, go, talk)
            first.append(await victim.read(32))
            await one.read(1)
            await two.read(1)
            await two.step(1, 2)  # whatever waited has been computed by now
            return torch.cat([*first, await victim.step(32, 33)])

    assert torch.allclose(wait_for(run()), alone, rtol=1e-4, atol=1e-4)
