"""Work never outlives the ownership of what it writes: steps of sessions that end while they wait or are
computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc
import pytest
import torch
from bystanders import Found, Soak, questions
from slots import check_slots
from swarms import APART, opening
from waiting import reached

from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.messages import SESSION, SequenceChunk
from firsttoken.petals.wire import decode, encode

WIDTH = 32


def rows(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed * 1000 + tokens))


class Talking:
    """One session with a server, whose steps can be sent and read apart."""

    def __init__(self, channel: grpc.aio.Channel, model: str) -> None:
        self.call = channel.stream_stream(SESSION)(metadata=opening(model))

    async def send(self, start: int, end: int, *, first: int = 0, number: int = 0) -> None:
        said = encode(rows(end - start, start), "float32", [SequenceChunk(number, start, end)], first=first)
        await self.call.write(said)

    async def read(self, tokens: int) -> torch.Tensor:
        return decode(await self.call.read(), "float32", WIDTH, torch.float32, tokens).hidden

    async def step(self, start: int, end: int, **options: int) -> torch.Tensor:
        await self.send(start, end, **options)
        return await self.read(end - start)


@pytest.fixture
def alone(folder) -> torch.Tensor:
    """What the blocks say to tokens [0, 32) and then to [32, 33) of one sequence, with nobody else about."""
    backend = BlockBackend(folder, range(6), torch.float32, 64)
    slots, mine, out = KVSlots(backend.pool.blocks, backend.pool.shape.block_tokens, 1, backend.context), {}, []
    for start, end in ((0, 32), (32, 33)):
        chunks = slots.place(mine, [SequenceChunk(0, start, end)])
        out += backend.run(range(6), chunks, [rows(end - start, start)])
        slots.computed(mine, [SequenceChunk(0, start, end)])
    return torch.cat(out)


@pytest.fixture
def held(here):
    """A server whose thread waits until it is let go."""
    server, go = here.serve((0, 6), limits={"kv_tokens": 128, "idle_s": 30.0})[0], threading.Event()
    yield server, go
    go.set()


async def shut_while(server, go: threading.Event, talk: Callable[[], Awaitable[None]]) -> None:
    """``talk`` while nothing is computed; then everything is."""
    go.clear()
    blocked = asyncio.create_task(server.sessions.batcher.run_between(lambda: go.wait(30)))
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
    slots = server.sessions.slots

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
                await reached(lambda: slots.held == 1 and not waiting(server))
                await two.send(0, 1)
                await reached(lambda: waiting(server) == 1)
                await gone.send(0, 33, first=3)
                await reached(lambda: waiting(server) == 2)
                gone.call.cancel() if goes == "cancelled" else await other.close()
                with suppress(asyncio.CancelledError):
                    await gone.call.code()
                await reached(lambda: server.sessions.open == 3)
                await victim.send(0, 32)  # into the blocks that have come free, together with ``two``
                await reached(lambda: slots.held == 3)

            await shut_while(server, go, talk)
            first.append(await victim.read(32))
            await one.read(1)
            await two.read(1)
            await two.step(1, 2)  # whatever waited has been computed by now
            return torch.cat([*first, await victim.step(32, 33)])

    assert torch.allclose(wait_for(run()), alone, rtol=1e-4, atol=1e-4)


def test_a_step_whose_sequence_makes_room_is_answered_and_keeps_its_blocks_until_then(here, held, alone):
    """One client has the whole pool in steps that wait; another's step waits for these, and for nothing else."""
    server, go = held
    slots = server.sessions.slots

    async def run() -> torch.Tensor:
        async with (
            grpc.aio.insecure_channel(server.record.address, APART) as channel,
            grpc.aio.insecure_channel(server.record.address, APART) as other,
        ):
            hoard = [Talking(channel, here.model) for _ in range(2)]
            victim = Talking(other, here.model)

            async def talk() -> None:
                for one in hoard:
                    await one.send(0, 64, first=3)
                await reached(lambda: slots.held == 2 and not slots.pool.free)
                await victim.send(0, 32)
                await reached(lambda: slots.held == 1)  # one of them has made room, of which nothing is free yet
                await asyncio.sleep(0.05)
                assert slots.held == 1 and not slots.pool.free
                check_slots(slots)

            await shut_while(server, go, talk)
            first = await victim.read(32)
            for one in hoard:
                assert (await one.read(64)).shape == (64, WIDTH)
            return torch.cat([first, await victim.step(32, 33)])

    assert torch.allclose(wait_for(run()), alone, rtol=1e-4, atol=1e-4)
    check_slots(slots)


def test_a_step_that_cannot_be_computed_fails_no_other_of_its_batch(here, held):
    server, go = held
    backend = server.sessions.batcher.backend
    run_stack = backend.run

    def fails(layers, chunks, hidden):
        if any(chunk.tokens == 7 for chunk in chunks):
            raise MemoryError("too much")
        return run_stack(layers, chunks, hidden)

    async def run() -> tuple[str, str]:
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            first, bad, good = (Talking(channel, here.model) for _ in range(3))
            backend.run = fails

            async def talk() -> None:
                await first.send(0, 1)
                await reached(lambda: server.sessions.slots.held == 1 and not waiting(server))
                await bad.send(0, 7)
                await good.send(0, 5)
                await reached(lambda: waiting(server) == 2)

            await shut_while(server, go, talk)
            assert (await good.read(5)).shape == (5, WIDTH)
            with suppress(grpc.aio.AioRpcError):
                await bad.call.read()
            return (await bad.call.code()).name, await bad.call.details()

    assert wait_for(run()) == ("INTERNAL", "the blocks failed: too much")
    check_slots(server.sessions.slots)


def test_who_waits_when_a_server_ends_is_answered_or_hears_it(here):
    """Steps that are under way have their time, and nothing that is written has another owner meanwhile."""
    server, go = here.serve((0, 6), limits={"kv_tokens": 128})[0], threading.Event()

    async def run() -> list[int]:
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            one, two = (Talking(channel, here.model) for _ in range(2))
            await one.step(0, 3)
            await two.step(0, 3)
            blocked = asyncio.create_task(server.sessions.batcher.run_between(lambda: go.wait(30)))
            await one.send(3, 4)
            await reached(lambda: len(server.sessions.slots._leased) == 1 and not waiting(server))
            await two.send(3, 4, first=2)
            await reached(lambda: waiting(server) == 1)
            ending = asyncio.create_task(here._stack.aclose())
            await asyncio.sleep(0.1)
            check_slots(server.sessions.slots)
            go.set()
            await blocked
            said = [await one.read(1), await two.read(1)]
            await ending
            with pytest.raises(grpc.aio.AioRpcError):
                await Talking(channel, here.model).step(0, 1)
            return [len(one) for one in said]

    assert wait_for(run()) == [1, 1]
    check_slots(server.sessions.slots)
    assert not server.sessions.slots.held and not server.sessions.slots._leased


def test_a_server_moves_when_no_step_has_a_block_any_more(here, held):
    """A step that is computed while its session is ended by a move has its blocks until it has run."""
    server, go = held
    sessions, slots = server.sessions, server.sessions.slots

    async def run() -> None:
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            one, two = (Talking(channel, here.model) for _ in range(2))

            async def talk() -> None:
                await one.send(0, 20)
                await reached(lambda: slots.held == 1 and not waiting(server))
                await two.send(0, 20, first=1)
                await reached(lambda: waiting(server) == 1)
                one.call.cancel()
                two.call.cancel()
                await sessions.drain(0.0)
                assert not waiting(server) and not slots.held and len(slots._leased) == 2
                check_slots(slots)

            await shut_while(server, go, talk)
            await sessions.batcher.run_between(lambda: server.sessions.batcher.backend.move(range(6)))
            sessions.moving = False
            await reached(lambda: not slots._leased)
            assert slots.pool.free == slots.pool.count
            assert (await Talking(channel, here.model).step(0, 4)).shape == (4, WIDTH)

    wait_for(run())


def test_bystanders_say_what_the_local_model_says_beside_whatever_others_do(folder):
    """Some schedules of ``soak_sessions.py``, which runs as many as one likes."""
    found = Found()
    with Soak(folder, questions(6)) as soak:
        for seed in range(12):
            soak.schedule(seed, found)
        soak.left()
    assert found.answers >= 12 and not found.wrong and not found.failed
