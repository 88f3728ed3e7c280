"""Announcements: what is forged, replayed, stale, of the future or under another's key is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from firsttoken.petals.contacts import TALK, Exchanged, decode_exchange, encode_exchange
from firsttoken.petals.keys import public_hex, server_key
from firsttoken.petals.records import (
    LONGEST_S,
    MOST,
    Record,
    Registry,
    StaleRecordError,
    TwinError,
    UnprovenRecordError,
    read_record,
)
from firsttoken.study.errors import SwarmError

NOW = 1_000_000.0
KEY = Ed25519PrivateKey.from_private_bytes(b"1" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"2" * 32)


def record(key=KEY, at=NOW, life=30.0, **changed) -> Record:
    made = Record(public_hex(key), "127.0.0.1:4000", (0, 3), "a" * 64, 100.0, NOW, at, at + life)
    return replace(made, **changed).signed(key)


def keyed(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


def test_the_latest_record_of_each_server_counts_until_it_expires():
    registry = Registry()
    assert registry.accept(record(), NOW) and not registry.accept(record(), NOW)
    assert registry.accept(record(OTHER, address="127.0.0.1:4001"), NOW)
    assert registry.accept(later := record(at=NOW + 10, blocks=(1, 4)), NOW + 10)
    assert {one.blocks for one in registry.serving("a" * 64, NOW + 10)} == {(1, 4), (0, 3)}
    assert registry.serving("b" * 64, NOW + 10) == []
    assert registry.live(NOW + 31) == [later]
    assert registry.live(NOW + 41) == []  # no ghost
    assert registry.accept(record(at=NOW + 50, blocks=(0, 0)), NOW + 50)  # it leaves
    assert registry.serving("a" * 64, NOW + 50) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(record(), blocks=(0, 6)), "not signed by its key: it is forged"),
        (replace(record(), server=public_hex(OTHER)), "not signed by its key: it is forged"),
        (replace(record(), expires=NOW + 60), "not signed by its key: it is forged"),
        (replace(record(), address="127.0.0.1:4002"), "not signed by its key: it is forged"),
        (record(life=LONGEST_S + 1), "a life of more than 300 s"),
        (record(blocks=(3, 1)), "has no blocks"),
        (record(target=(3, 1)), "has no blocks"),
        (replace(record(), target=(0, 6)), "not signed by its key: it is forged"),
    ],
    ids=["blocks", "server", "expiry", "address", "long", "backwards", "nowhere", "wish"],
)
def test_what_is_not_a_servers_own_word_of_now_is_refused(wrong, said):
    registry = Registry()
    with pytest.raises(SwarmError, match=said):
        registry.accept(wrong, NOW)
    assert registry.live(NOW) == []


def test_a_replayed_record_is_refused_also_after_the_later_one_has_gone():
    registry = Registry()
    old = record(life=LONGEST_S)
    registry.accept(record(at=NOW + 5, life=10.0), NOW + 5)
    with pytest.raises(StaleRecordError, match="older than the one that is known: it is replayed"):
        registry.accept(old, NOW + 6)
    for now, wrong in ((NOW + 6, StaleRecordError), (NOW + 100, UnprovenRecordError)):
        with pytest.raises(wrong):
            registry.renew(old, now)


@pytest.mark.parametrize("off_s", [-1e6, -60.0, 60.0, 1e6])
def test_a_record_counts_for_its_life_whatever_the_clock_of_its_server_says(off_s):
    """What is passed on of it lives no longer than from when it was issued, as far as its own word has shown that."""
    registry = Registry()
    registry.accept(record(at=NOW + off_s), NOW + 8)  # it was 8 s on its way
    assert registry.live(NOW + 37.9) and not registry.live(NOW + 38.1)
    registry.accept(record(at=NOW + off_s + 10), NOW + 10.5)
    registry.renew(record(at=NOW + off_s + 20), NOW + 30)  # that came late
    assert registry.live(NOW + 50.4) and not registry.live(NOW + 50.6)
    with pytest.raises(UnprovenRecordError, match="expired on its way here"):
        registry.renew(record(at=NOW + off_s + 20.1, life=9.0), NOW + 49)
    registry.renew(record(at=NOW + off_s + 1000), NOW + 50)  # issued ahead: it counts from now on
    assert registry.live(NOW + 79.9) and not registry.live(NOW + 80.1)


def test_a_server_that_runs_again_by_another_clock_is_believed_when_it_says_so_itself():
    registry, again = Registry(), record(at=NOW - 60, started=NOW - 60)
    registry.accept(record(), NOW)
    with pytest.raises(UnprovenRecordError):
        registry.renew(again, NOW + 1)
    assert registry.accept(again, NOW + 1) and registry.live(NOW + 30.9) == [again]


def test_of_two_servers_with_one_key_the_earlier_counts():
    registry, twin = Registry(), {"address": "127.0.0.1:4009", "started": NOW + 1}
    registry.accept(record(), NOW)
    with pytest.raises(TwinError, match=r"in use at 127.0.0.1:4000: give each server a key of its own, or wait 28 s"):
        registry.accept(record(at=NOW + 2, **twin), NOW + 2)
    registry.accept(record(at=NOW + 31, **twin), NOW + 31)  # the first one's life is over, and it was only restarted
    registry.accept(record(at=NOW + 32), NOW + 32)  # it was a partition, and heals
    assert registry.serving("a" * 64, NOW + 32)[0].address == "127.0.0.1:4000"


def test_a_registry_holds_so_many_and_who_is_new_finds_room():
    registry = Registry()
    for number in range(MOST + 3):
        registry.accept(record(keyed(number), address=f"127.0.0.1:{4000 + number}"), NOW)
    held = {one.address for one in registry.live(NOW)}
    assert held == {f"127.0.0.1:{4000 + number}" for number in range(3, MOST + 3)}  # who was longest silent is gone
    with pytest.raises(SwarmError, match="an exchange of 513 records"):
        decode_exchange(encode_exchange([record()] * (MOST + 1)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"server": "zz"}, "server: "),
        ({"address": "nowhere"}, "expected HOST:PORT"),
        ({"address": "h:99999"}, "expected HOST:PORT"),
        ({"blocks": [0, 10**9]}, "blocks"),
        ({"throughput": "fast"}, "throughput"),
        ({"extra": 1}, "extra"),
        ({"signature": 5}, "signature"),
    ],
)
def test_what_is_no_record_is_named(change, said):
    with pytest.raises(SwarmError, match=f"no record of a server: .*{said}"):
        read_record(record().as_dict() | change)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"server": 1, "records": []}', b'{"records": []}', b"\xff"])
def test_what_is_no_exchange_is_refused(data):
    with pytest.raises(SwarmError, match="an exchange of records cannot be read"):
        decode_exchange(data)
    assert decode_exchange(encode_exchange([record()], "a" * 64)) == Exchanged("a" * 64, (record(),), talk=TALK)
    assert json.loads(encode_exchange([]))["server"] is None


def test_a_key_is_made_once_and_read_again(tmp_path):
    path = tmp_path / "key"
    assert public_hex(server_key(path)) == public_hex(server_key(path)) != public_hex(server_key(None))
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"short")
    with pytest.raises(SwarmError, match="holds no Ed25519 key of 32 bytes: name a new file"):
        server_key(path)
    with pytest.raises(SwarmError, match="cannot be read or written: Is a directory"):
        server_key(tmp_path)
