"""Clients that lie, flood, vanish or sleep: one clear line, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import threading

import grpc
import pytest
import torch
from swarms import opening
from waiting import TIMEOUT_S, reached

from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import EXCHANGE, SESSION, SequenceChunk, most_bytes
from firsttoken.petals.wire import encode

WIDTH = 32


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))


def message(number: int, start: int, end: int) -> bytes:
    return encode(rows(end - start), "float32", [SequenceChunk(number, start, end)])


@pytest.fixture
def server(here):
    """Blocks [2, 4), of little."""
    limits = {"sessions": 3, "sequences": 4, "kv_tokens": 256, "idle_s": 1.5}
    return here.serve((2, 4), limits=limits)[0]


@pytest.fixture
def talk(here, server):
    """Open a session, send ``said`` one after the other; the answers, or the error's code and line."""

    def talk(*said: bytes, **changed: str):
        given = dict(opening(here.model, "2:4")) | {f"swarm-{name}": value for name, value in changed.items()}

        async def go():
            async with grpc.aio.insecure_channel(server.record.address) as channel:
                call = channel.stream_stream(SESSION)(metadata=tuple(given.items()), timeout=TIMEOUT_S)
                answers = []
                try:
                    for one in said:
                        await call.write(one)
                        answers.append(await call.read())
                    await call.done_writing()
                    if await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK:
                        return answers
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass
                return (await call.code()).name, await call.details()

        return wait_for(go())

    return talk


def left(here, server) -> None:
    """Nothing of any client is left."""

    wait_for(reached(lambda: not server.sessions.open))
    room = server.sessions.slots
    assert room.held == 0 and room.pool.free == room.pool.count
    room.pool.check()


FAULTS = {
    "another model": ({"model": "b" * 64}, b"", "FAILED_PRECONDITION", "has blocks of the model"),
    "another version": ({"version": "1"}, b"", "FAILED_PRECONDITION", "speaks version 4 .* not '1'"),
    "other blocks": ({"blocks": "1:4"}, b"", "FAILED_PRECONDITION", r"has blocks \[2, 4\), not \[1, 4\)"),
    "too many blocks": ({"blocks": "2:5"}, b"", "FAILED_PRECONDITION", "blocks '2:5' are not a:b"),
    "coding": ({"coding": "int4"}, b"", "INVALID_ARGUMENT", "no coding is called 'int4'"),
    "junk": ({}, b"junk", "INVALID_ARGUMENT", "no safetensors of a step"),
    "oversized": ({}, b"x" * (most_bytes(WIDTH) + 1), "RESOURCE_EXHAUSTED", "larger than max"),
    "not at its start": ({}, message(0, 3, 5), "ABORTED", "has 0 tokens here, and the step begins at 3"),
    "beyond the pool": ({}, message(0, 0, 257), "RESOURCE_EXHAUSTED", "the pool of 256 tokens is full"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_told_in_one_line_and_leaves_nothing(here, server, talk, kind):
    changed, said, code, line = FAULTS[kind]
    got = talk(said, **changed)
    assert got[0] == code, got
    assert re.search(line, got[1]), got[1]
    assert "\n" not in got[1]
    assert len(talk(message(0, 0, 3), message(0, 3, 4))) == 2  # others are served
    left(here, server)


def test_sessions_and_sequences_are_so_many(here, server, talk):
    many = [SequenceChunk(number, 0, 1) for number in range(5)]
    code, said = talk(encode(rows(5), "float32", many))
    assert code == "RESOURCE_EXHAUSTED" and "at most 4 are taken" in said

    async def crowd():
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            calls = [channel.stream_stream(SESSION)(metadata=opening(here.model, "2:4")) for _ in range(4)]
            return sorted([await _code(call) for call in calls])

    async def _code(call) -> str:
        try:
            await call.write(message(0, 0, 1))
            await call.read()
            return "answer"
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return (await call.code()).name

    assert wait_for(crowd()) == ["RESOURCE_EXHAUSTED", "answer", "answer", "answer"]
    left(here, server)


def test_a_client_that_vanishes_or_sleeps_or_never_reads_leaves_nothing(here, server):
    async def misbehave() -> list[str]:
        given = opening(here.model, "2:4")
        channel = grpc.aio.insecure_channel(server.record.address)
        vanishing = channel.stream_stream(SESSION)(metadata=given)
        await vanishing.write(message(0, 0, 40))
        await channel.close()  # in the middle of a step
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            sleeping = channel.stream_stream(SESSION)(metadata=given)
            await sleeping.write(message(0, 0, 1))
            await sleeping.read()
            deaf = channel.stream_stream(SESSION)(metadata=given)
            said = encode(rows(200), "float32", [SequenceChunk(0, 0, 200)])
            try:
                for _ in range(200):
                    async with asyncio.timeout(1.0):
                        await deaf.write(said)
            except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            await reached(lambda: server.sessions.ends["IdleClientError"] >= 2)
            return [(await sleeping.code()).name, await sleeping.details()]

    code, said = wait_for(misbehave())
    assert (code, said) == ("ABORTED", "the client said nothing for 1.5 s; open a session again")
    left(here, server)


def test_nothing_grows_over_many_sessions(here, server):
    """Each with two sequences, of which one is told to be over; the rest goes with the session."""

    async def sessions(count: int) -> None:
        given = opening(here.model, "2:4")
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            for _ in range(count):
                call = channel.stream_stream(SESSION)(metadata=given)
                await call.write(encode(rows(20), "float32", [SequenceChunk(0, 0, 12), SequenceChunk(1, 0, 8)]))
                await call.read()
                await call.write(encode(None, "float32", finished=[1]))
                await call.done_writing()
                await call.read()

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    def sizes() -> tuple[int, ...]:
        memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return memory_kb, threading.active_count(), len(os.listdir("/dev/fd")), wait_for(tasks())

    wait_for(sessions(50))
    before = sizes()
    wait_for(sessions(400))
    grown = [after - size for size, after in zip(before, sizes(), strict=True)]
    assert grown[0] < 4096 and max(grown[1:]) < 5  # kB; a sequence that stays is 20 kB
    left(here, server)
    assert server.sessions.ends["left"] >= 450


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"junk", "an exchange of records cannot be read"), (b'{"server": null, "records": [{}]}', "is no record")],
)
def test_an_exchange_that_cannot_be_read_is_refused(server, data, said):
    async def go() -> None:
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            await channel.unary_unary(EXCHANGE)(data)

    with pytest.raises(grpc.aio.AioRpcError, match=said):
        wait_for(go())
