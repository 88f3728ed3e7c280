"""What strangers say of servers: it costs nobody a place, and leads nobody to where no server has said that it is."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from strangers import NOW, keyed, record, said
from swarms import says
from waiting import until

from firsttoken.petals import contacts as contacts_module
from firsttoken.petals.access import Access
from firsttoken.petals.addresses import check_kind, check_name, network_of, source_of, spot_of
from firsttoken.petals.contacts import (
    ASKED_BYTES,
    EXCHANGE,
    PAGE_BYTES,
    Contacts,
    Exchanged,
    decode_exchange,
    encode_exchange,
    exchange,
    page_of,
    proof_of,
)
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.keys import public_hex
from firsttoken.petals.messages import most_bytes
from firsttoken.petals.records import MOST, Record, Registry, UnprovenRecordError
from firsttoken.study.errors import SwarmError

JUNK = 10 * MOST


FORMS: tuple[Callable[[Record, float], Record], ...] = (
    lambda one, now: one,
    lambda one, now: replace(one, model="c" * 64),
    lambda one, now: replace(one, issued=now - 100, expires=now - 70),
    lambda one, now: replace(one, issued=now + 60, expires=now + 90),
    lambda one, now: replace(one, address="192.0.2.7:4000"),
    lambda one, now: replace(one, address="a" * 251 + ":4000"),
    lambda one, now: replace(one, address="[::ffff:127.0.0.1]:22"),
    lambda one, now: replace(one, expires=now + 300),
)


def junk(number: int, model: str, now: float) -> Record:
    """A record that anybody may sign with a fresh key, of one of many forms."""
    made = record(1000 + number, now, model=model, address=f"127.0.0.1:{1 + number % 20}")
    return FORMS[number % len(FORMS)](made, now).signed(keyed(1000 + number))


class Port:
    """A port of this machine that is no server's, and counts who connects to it."""

    def __init__(self) -> None:
        self.came = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.number = self._listening.getsockname()[1]
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self.came += 1
                near.close()

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.close()


async def all_said(address: str, records: list[Record], connections: int = 8) -> list[Exchanged]:
    async def some(part: list[Record]) -> list[Exchanged]:
        access = Access()
        async with access.channel(address, 32) as channel:
            return [await exchange(channel, access, encode_exchange([one], one.server), 60.0) for one in part]

    parts = await asyncio.gather(*(some(records[first::connections]) for first in range(connections)))
    return [one for part in parts for one in part]


def test_ten_times_the_limit_of_junk_keeps_nobody_out(here, client, asked):
    """Some over connections, the rest as the server hears it, from a new place every few records."""
    (door,), now = here.serve((0, 3)), time.time()
    records = [junk(number, here.model, now) for number in range(JUNK)]
    told = wait_for(all_said(door.record.address, records[:160]))
    assert all(one.refused for one in told)
    contacts = door.announcer._contacts

    async def hear_all() -> list[str]:
        return [await contacts.receive(one, f"host {number // 12}") for number, one in enumerate(records[160:])]

    assert all(wait_for(hear_all()))
    assert [one.server for one in door.registry.live(time.time())] == [door.record.server]
    (new,) = here.serve((3, 6), peers=[door.record.address])
    until(
        lambda: new.record.server in {one.server for one in door.registry.live(time.time())}, "an honest one has room"
    )
    model = client(door.record.address)
    assert {up.server for up in model.swarm.servers()} == {door.record.server, new.record.server}
    says(model, asked(8, 4))


def test_a_list_travels_in_pages_that_every_member_takes():
    """The longest list of the longest records, whose addresses have as many characters as an address may."""
    known = [record(number, address=f"{number:0251d}:4000") for number in range(MOST)]
    own, heard, after, pages = known[7], [], "", 0
    while pages == 0 or after:
        page, after = page_of(known, own, after)
        message = encode_exchange(page, own.server, after=after)
        assert len(message) < PAGE_BYTES + 1024 < most_bytes(1) * 3 / 4
        heard += decode_exchange(message).records
        pages += 1
    assert heard[0] == own and {one.server for one in heard} == {one.server for one in known}
    assert len(heard) == MOST and 1 < pages < 20


@pytest.mark.parametrize("seed", range(5))
def test_under_any_junk_an_honest_record_that_is_said_at_its_address_is_taken_and_stays(seed):
    draw, registry, now = random.Random(seed), Registry(), NOW
    honest, taken = {number: record(number) for number in range(1, 9)}, {}
    for step in range(200):
        now += draw.random() / 20
        what = draw.randrange(4)
        some = honest[draw.randrange(1, 9)]
        if what == 0:  # it says that it is there
            taken[some.server] = record(int(some.address.split(":")[1]) - 4000, now)
            registry.accept(taken[some.server], now)
        elif what == 1:  # anybody passes on what anybody signed
            wrong = registry.accept_all([junk(draw.randrange(5000), "a" * 64, now) for _ in range(8)], now)
            assert all(isinstance(error, UnprovenRecordError) for error in wrong.values()) and len(wrong) > 0
        elif what == 2:  # or forges what is newer than what is known
            forged = [replace(one, issued=now + 4, blocks=(0, 1)) for one in taken.values()]
            registry.accept_all(forged + [replace(one, server=public_hex(keyed(5))) for one in taken.values()], now)
        elif draw.random() < 0.5:  # or another's address for a key of its own
            registry.accept_all([record(3000 + step, now, address=some.address)], now)
        assert {one.server: one for one in registry.live(now)} == taken


def test_who_renews_stays_where_others_prove_themselves_without_end():
    """Of one network are most: its own lose their places, and no other machine does."""
    registry, alone = Registry(), record(0, address="198.51.100.7:4000")
    registry.accept(alone, NOW)
    for number in range(1, MOST + 100):
        registry.accept(record(number, address=f"192.0.2.{number % 200}:{4000 + number}"), NOW)
    assert len(registry.live(NOW)) == MOST and alone in registry.live(NOW)
    assert registry.at("198.51.100.7:4000", NOW) == alone
    registry.accept(record(9999, address="198.51.100.7:4000"), NOW)  # another answers there now
    assert alone not in registry.live(NOW)


def test_a_strangers_port_is_connected_to_once_whoever_names_it(here, client, port, monkeypatch):
    """By fresh keys, over many connections, in all ways to write it: of two servers and a client."""
    monkeypatch.setattr(contacts_module, "_AGAIN_S", contacts_module._LONGEST_S)  # 2 s are not all that this may take
    ups, now = here.serve((0, 3), (3, 6)), time.time()
    names = [f"127.0.0.1:{port.number}", f"localhost:{port.number}", f"127.0.0.2:{port.number}"]
    names += [f"[::ffff:127.0.0.1]:{port.number}", f"[::1]:{port.number}", f"127.9.9.9:{port.number}"]
    records = [record(number, now, model=here.model, address=names[number % len(names)]) for number in range(120)]
    for up in ups:
        told = wait_for(all_said(up.record.address, records, 20))
        assert all("call" in one.refused or "asked from" in one.refused for one in told)
    assert port.came <= 2
    model = client(ups[0].record.address)
    for _ in range(5):
        wait_for(model.swarm.refresh())
    assert port.came <= 2 and len(model.swarm.servers()) == 2


def test_a_member_that_names_a_strangers_port_leads_each_there_once(here, client, port):
    """It has a key and a port of its own, and passes on ten times the limit of records."""
    now, key = time.time(), keyed(1)
    names = [f"127.0.0.1:{port.number}", f"localhost:{port.number}"]
    told = [record(100 + n, now, model=here.model, address=names[n % 2]) for n in range(JUNK // 20)]
    told += [record(5000 + n, now, model=here.model, address=f"127.0.0.1:{1 + n % 900}") for n in range(64)]
    told += [record(50, now, address="192.0.2.7:4000")]

    async def lies(data: bytes, _: object) -> bytes:
        said = decode_exchange(data)
        own = record(1, time.time(), model=here.model, address=address[0])
        proof = proof_of(key, own, said.nonce) if said.nonce else None
        first = int(said.after or 0)  # pages that never end
        page = told[first : first + 60]
        return encode_exchange(
            [own, *page] if not first else page, own.server, proof=proof, after=str(first + 60).zfill(4)
        )

    async def start() -> grpc.aio.Server:
        server = grpc.aio.server()
        calls = {"Exchange": grpc.unary_unary_rpc_method_handler(lies)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("firsttoken.Swarm", calls),))
        address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        return server

    address: list[str] = []
    server = wait_for(start())
    began = time.monotonic()
    (up,) = here.serve((0, 6), peers=[address[0]], limits={"expiry_s": 3.0})
    until(lambda: len(up.registry.live(time.time())) == 2, "both are known")
    model = client(address[0])
    for _ in range(4):
        wait_for(model.swarm.refresh())
    time.sleep(1.0)  # the server looks again, too
    rounds = 1 + (time.monotonic() - began) // 2  # who looks leads there once, and again after 2 s at the earliest
    assert 1 <= port.came <= 3 * rounds
    assert {one.server for one in model.swarm.servers()} == {public_hex(key)}
    assert "on another machine, and this swarm has no TLS" in model.swarm.contacts.faults["192.0.2.7:4000"]
    wait_for(server.stop(None))


def test_an_address_that_does_not_prove_itself_is_left_alone_longer_each_time(monkeypatch):
    contacts, clock, asked = Contacts(Registry(), Access(), 8), [0.0], []
    named = [record(n, address="127.0.0.1:22") for n in range(5)]
    monkeypatch.setattr(contacts_module.time, "monotonic", lambda: clock[0])
    while clock[0] < 300:
        contacts._hints = {one.server: [one, replace(one, address="localhost:22")] for one in named}
        if any(address.endswith(":22") for address in contacts.due(set())):
            asked.append(clock[0])
        clock[0] += 0.5
    assert asked == [0.0, 2.0, 18.0, 78.0, 138.0, 198.0, 258.0]


def test_who_answers_elsewhere_or_as_another_is_not_believed(here):
    (door,), now = here.serve((0, 6)), time.time()
    mine = wait_for(said(door.record.address, record(5, now, address=door.record.address)))
    assert "is this server's own address" in mine.refused
    (other,) = here.serve((0, 6))
    told = wait_for(said(door.record.address, record(6, now, address=other.record.address)))
    assert f"another server than {public_hex(keyed(6))[:8]} answers at {other.record.address}" in told.refused
    assert other.record.server in {one.server for one in door.registry.live(time.time())}  # it did answer
    moved = replace(other.record, issued=time.time() + 1, address="127.0.0.1:1")
    assert "forged" in wait_for(said(door.record.address, moved)).refused


def test_more_than_one_record_is_not_read(here):
    (door,), now = here.serve((0, 6)), time.time()
    many = [record(number, now) for number in range(256)]

    async def flood() -> None:
        async with grpc.aio.insecure_channel(door.record.address) as channel:
            await channel.unary_unary(EXCHANGE)(encode_exchange(many, many[0].server))

    with pytest.raises(grpc.aio.AioRpcError, match=f"in {ASKED_BYTES} bytes at most: .* are not read"):
        wait_for(flood())
    told = wait_for(said(door.record.address, record(1, now)))
    assert len(encode_exchange([record(1, now, address="a" * 250 + ":4000")], "a" * 64, nonce="0" * 32)) < ASKED_BYTES
    assert decode_exchange(encode_exchange(told.records, told.server)).records == told.records


@pytest.mark.parametrize(
    ("address", "near", "far"),
    [
        ("127.0.0.1:4000", True, False),
        ("localhost:4000", True, False),
        ("[::1]:4000", True, False),
        ("[::ffff:127.0.0.1]:4000", True, False),
        ("192.0.2.7:4000", False, True),
        ("host.example:443", False, True),
        ("[2001:db8::1]:4000", False, True),
        ("127.1:4000", False, True),  # a name to ipaddress: it is looked up before anybody connects
        ("0.0.0.0:4000", False, False),
        ("[::]:4000", False, False),
        ("224.0.0.1:4000", False, False),
        ("169.254.169.254:80", False, False),
        ("127.0.0.1:0", False, False),
        ("127.0.0.1:99999", False, False),
        ("127.0.0.1:٤", False, False),
        ("hóst:4000", False, False),
        ("a b:4000", False, False),
        (":4000", False, False),
    ],
)
def test_an_address_is_of_the_kind_of_its_swarm(address, near, far):
    for kind, fits in (({"near": True, "far": False}, near), ({"near": False, "far": True}, far)):
        if fits:
            check_kind(address, **kind)
        else:
            with pytest.raises(SwarmError):
                check_kind(address, **kind)


def test_one_place_has_one_name():
    assert (
        len({spot_of(f"{host}:22") for host in ("127.0.0.1", "localhost", "[::1]", "127.3.2.1", "LOCALHOST"[:0])}) == 2
    )
    assert spot_of("[2001:db8:0::1]:22") == spot_of("[2001:DB8::1]:022") != spot_of("[2001:db8::1]:23")
    assert spot_of("Host.Example.:22") == spot_of("host.example:22")
    assert network_of("192.0.2.7:1") == network_of("192.0.2.9:2") != network_of("192.0.3.7:1")
    assert source_of("ipv4:192.0.2.7:5") == source_of("ipv4:192.0.2.8:6") and "5" in source_of("ipv4:127.0.0.1:5")
    assert source_of("ipv6:%5B::1%5D:5") != source_of("ipv6:%5B::1%5D:6")
    for name in ("127.1:4000", "nosuch.invalid:4000"):
        with pytest.raises(SwarmError, match=r"leads to 127\.0\.0\.1: .* is loopback|is the name of no machine"):
            wait_for(check_name(name))
