"""Whom a full server takes from and whose turn it is: no client shuts another out, and who is alone has everything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from itertools import pairwise

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slots import check_slots
from swarms import APART, opening
from waiting import reached

from firsttoken.engine.request import Sampling
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.fairness import HERE, Client, FairQueue, client_of, client_to_evict
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.messages import PASS, SESSION, SequenceChunk
from firsttoken.petals.tuning.frozen import MOST_WAITING
from firsttoken.petals.tuning.passes import Pass, encode_pass
from firsttoken.petals.wire import encode
from firsttoken.study.errors import BusyError

WIDTH = 32
A, B, C, D = (Client(host, name) for host, name in (("one", "a"), ("one", "b"), ("two", "c"), ("three", "d")))
CLIENTS = st.sampled_from([A, B, C, D])


def step(number: int, start: int, end: int) -> bytes:
    return encode(torch.randn(end - start, WIDTH), "float32", [SequenceChunk(number, start, end)])


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.1:5000", "192.0.2.1/32"),
        ("ipv4:127.0.0.1:5000", "loopback"),
        ("ipv4:127.9.9.9:5000", "loopback"),
        ("ipv6:%5B::1%5D:5000", "loopback"),
        ("ipv6:[::ffff:127.0.0.1]:5000", "loopback"),
        ("ipv6:[::ffff:192.0.2.1]:5000", "192.0.2.1/32"),
        ("ipv6:%5B2001:db8:0:1::5%5D:5000", "2001:db8:0:1::/64"),
        ("ipv6:[2001:db8:0:1:ffff::6]:5000", "2001:db8:0:1::/64"),
        ("ipv6:[fe80::1%25eth0]:5000", "fe80::/64"),
        ("unix:/run/socket", "unix"),
    ],
)
def test_a_client_is_a_connection_of_a_host(peer, host):
    client = client_of(peer)
    assert client.host == host and client != client_of(peer.replace("5000", "5001").replace("socket", "other"))


@settings(max_examples=60)
@given(st.dictionaries(CLIENTS, st.integers(0, 20)), CLIENTS, st.integers(1, 6))
def test_who_yields_still_has_as_much_as_who_asked(held, asking, wanted):
    """Or nobody would come to rest: two would take the same thing from each other again and again."""
    one = client_to_evict(held, asking, wanted)
    if one is None:
        return
    assert one != asking
    same = [client for client in held if client.host in (one.host, asking.host)]
    after = Counter({client: held[client] for client in same}) + Counter({asking: wanted})
    if one.host != asking.host:
        hosts = Counter()
        for client, count in after.items():
            hosts[client.host] += count
        assert hosts[one.host] > hosts[asking.host]
    else:
        assert after[one] > after[asking]
    assert client_to_evict(after, one, wanted) != asking


@settings(max_examples=60)
@given(st.lists(st.tuples(CLIENTS, st.integers(1, 50)), min_size=2, max_size=60))
def test_turns_are_fair_between_hosts_and_then_between_their_clients(steps):
    """While two wait all the time, what was begun for them differs by one step of each at most."""
    turns, waiting, most = FairQueue(), {A: [], B: [], C: []}, 50
    for client, cost in steps:
        waiting[client if client in waiting else A].append(cost)
    served = Counter()
    while all(waiting.values()):  # all of them, so that shares are due
        client = turns.next([one for one in waiting if waiting[one]])
        cost = waiting[client].pop()
        turns.charge(client, cost)
        served[client] += cost
        assert abs(served[A] + served[B] - served[C]) <= 2 * most
        assert abs(served[A] - served[B]) <= 2 * most


def test_turns_that_were_not_asked_for_are_not_saved_up():
    turns = FairQueue()
    for _ in range(100):
        turns.charge(turns.next([A]), 10)
    said = []
    for _ in range(6):  # B comes new: it begins beside A, not a hundred turns before it
        said.append(turns.next([A, B]))
        turns.charge(said[-1], 10)
    assert all(one != other for one, other in pairwise(said))


def test_room_is_made_by_who_has_most_and_by_who_was_idle_longest():
    slots, many, few = KVSlots(8, 4, 8, 64, spare_s=1000.0), {}, {}
    slots.place(many, [SequenceChunk(number, 0, 8) for number in range(4)], client=A)
    for number in (2, 0, 1, 3):  # their order of use
        slots.computed(many, [SequenceChunk(number, 0, 8)])
        time.sleep(0.002)
    slots.place(few, [SequenceChunk(0, 0, 12)], client=C)
    assert sorted(many) == [1, 3]  # two blocks each
    with pytest.raises(BusyError, match=r"the pool of 32 tokens is full; ask again in \d+\.\d s"):
        slots.place(few, [SequenceChunk(1, 0, 16)], client=C)  # more than its share
    check_slots(slots)
    slots.spare_s = 0.0
    slots.place(few, [SequenceChunk(1, 0, 16)], client=C)
    assert not many and sorted(few) == [0, 1]
    check_slots(slots)


@pytest.fixture
def small(here):
    """A server of little, and what opens sessions with it, over one connection for each ``client`` that is named."""
    up = here.serve((0, 6), limits={"sessions": 4, "kv_tokens": 128, "idle_s": 60.0, "spare_s": 60.0}, trains=True)[0]
    backend, channels = AsyncExitStack(), {}
    given = opening(here.model)

    async def channel(client: str) -> grpc.aio.Channel:
        if client not in channels:
            one = grpc.aio.insecure_channel(up.record.address, APART)
            channels[client] = await backend.enter_async_context(one)
        return channels[client]

    async def opened(client: str, *said: bytes) -> grpc.aio.StreamStreamCall:
        call = (await channel(client)).stream_stream(SESSION)(metadata=given)
        for one in said:
            await call.write(one)
            await call.read()
        if not said:
            await call.write(encode(None, "float32"))  # says nothing, and is there
        return call

    yield up, opened, channel, given
    wait_for(backend.aclose())


def test_sessions_that_compute_nothing_shut_nobody_out(small):
    """They make way at once, the oldest of them first."""
    up, opened, *_ = small

    async def run() -> None:
        empty = [await opened(f"flood {number}") for number in range(4)]
        await reached(lambda: up.sessions.open >= 4)
        await opened("victim", step(0, 0, 3))
        assert up.sessions.open == 4 and up.sessions.ends["MissingTokensError"] == 1
        assert (await empty[0].code()) is grpc.StatusCode.ABORTED

    wait_for(run())


def test_a_session_that_computes_nothing_is_idle_however_much_it_says(here):
    up = here.serve((0, 6), limits={"idle_s": 0.5})[0]
    given = opening(here.model)

    async def run() -> str:
        async with grpc.aio.insecure_channel(up.record.address) as channel:
            call = channel.stream_stream(SESSION)(metadata=given)
            await call.write(step(0, 0, 3))
            await call.read()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while not call.done():
                    await call.write(encode(None, "float32", finished=[1]))
                    await asyncio.sleep(0.1)
            return await call.details()

    assert wait_for(run()) == "the client said nothing for 0.5 s; open a session again"


def test_one_client_with_all_sessions_makes_way_for_another_and_not_for_itself(small):
    up, opened, *_ = small

    async def run() -> tuple[str, str]:
        crowd = [await opened("one", step(0, 0, 1)) for _ in range(4)]
        for _ in range(2):
            await opened("two", step(0, 0, 1))
        assert [call.done() for call in crowd].count(True) <= 2
        refused = await opened("two")
        return (await refused.code()).name, await refused.details()

    code, said = wait_for(run())
    assert code == "RESOURCE_EXHAUSTED"
    assert said.startswith("4 sessions are open here, and no more are taken; ask again in ")
    assert up.sessions.ends["MissingTokensError"] == 2


def test_one_client_with_the_whole_pool_makes_room_for_another(small):
    up, opened, *_ = small

    async def run() -> tuple[str, str]:
        whole = await opened("one", *(step(number, 0, 32) for number in range(4)))
        assert up.sessions.slots.pool.free == 0
        await opened("two", step(0, 0, 32))
        assert up.sessions.slots.held == 4
        await whole.write(step(1, 32, 33))  # one of those that stayed has no room to grow in
        with suppress(grpc.aio.AioRpcError):
            await whole.read()
        return (await whole.code()).name, await whole.details()

    code, said = wait_for(run())
    assert code == "RESOURCE_EXHAUSTED" and "the pool of 128 tokens is full; ask again in" in said
    check_slots(up.sessions.slots)


def test_a_flood_of_steps_is_computed_between_those_of_another(small):
    """The thread is held while one client's three sessions have a step waiting each; another's comes last, and is in
    the very next batch though it goes through other layers."""
    up, opened, *_ = small
    batcher, order, go = up.sessions.batcher, [], threading.Event()
    run_stack = batcher.backend.run

    def noted(layers, chunks, hidden):
        order.append((layers.start, len(chunks)))
        return run_stack(layers, chunks, hidden)

    async def run() -> None:
        flood = [await opened("one", step(0, 0, 1)) for _ in range(3)]
        victim = await opened("two", step(0, 0, 1))
        batcher.backend.run = noted
        blocked = asyncio.create_task(batcher.run_between(lambda: go.wait(30)))
        for first, call in enumerate(flood, 1):
            await call.write(encode(torch.randn(9, WIDTH), "float32", [SequenceChunk(0, 1, 10)], first=first))
        await reached(lambda: len(batcher._waiting) >= 2)  # the first is on its way to the thread
        await victim.write(step(0, 1, 2))
        await reached(lambda: len(batcher._waiting) >= 3)
        go.set()
        await blocked
        for call in (*flood, victim):
            assert await call.read() is not grpc.aio.EOF

    wait_for(run())
    assert [start for start, _ in order].index(0) == 1 and len(order) == 4


def test_passes_of_one_client_make_way_for_anothers(here, small):
    up, _, channel, given = small
    go, run_blocks = threading.Event(), up.frozen.run
    up.frozen.run = lambda layers, one: go.wait(30) and run_blocks(layers, one)
    message = encode_pass(Pass(torch.randn(1, 3, WIDTH), {}))

    async def run() -> Counter[str]:
        ask = (await channel("one")).unary_unary(PASS)
        crowd = [ask(message, metadata=given) for _ in range(MOST_WAITING + 1)]
        await reached(lambda: len(up.frozen._waiting) >= MOST_WAITING)
        other = asyncio.ensure_future((await channel("two")).unary_unary(PASS)(message, metadata=given).code())
        await reached(lambda: any(call.done() for call in crowd))
        go.set()
        assert (await other) is grpc.StatusCode.OK
        return Counter([(await call.code()).name for call in crowd])

    assert wait_for(run()) == {"OK": MOST_WAITING, "RESOURCE_EXHAUSTED": 1}


def test_who_is_refused_and_says_nothing_is_listened_to_in_a_bounded_number(small):
    up, _, channel, given = small
    up.sessions.moving = True  # refuses whoever comes

    async def run() -> list[str]:
        calls = [(await channel("one")).stream_stream(SESSION)(metadata=given) for _ in range(6)]
        codes = [asyncio.ensure_future(call.code()) for call in calls]
        await reached(lambda: sum(code.done() for code in codes) >= 2)
        assert sum(code.done() for code in codes) == 2 and up.sessions._refused == 4
        for call in calls:
            if not call.done():
                await call.done_writing()
        return [await call.details() for call in calls]

    assert set(wait_for(run())) == {"this server moves to other blocks: ask another"}
    assert up.sessions._refused == 0


def test_a_client_that_made_way_says_the_same_as_the_local_model(here, client, asked):
    """It sends again what it has lost, and its answer goes on."""
    up = here.serve((0, 6), limits={"sessions": 2, "kv_tokens": 64, "spare_s": 0.05})[0]
    one, other, first, second = client(up.record.address), client(up.record.address), asked(20, 8), asked(33, 4)
    request = one.engine.submit(first.prompt, Sampling(8))
    while len(request.output) < 4:
        one.engine.step()
    time.sleep(0.1)
    again = other.engine.submit(second.prompt, Sampling(4))
    other.engine.run()
    one.engine.run()
    assert request.output == first.plain.tokens and again.output == second.plain.tokens
    assert up.sessions.slots.held <= 2 and HERE not in {
        sequence.client for *_, sequence in up.sessions.slots._homes.values()
    }
