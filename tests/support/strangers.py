"""Keys and records of servers that are none, and what a member answers to who says one."""

from __future__ import annotations

from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from firsttoken.petals.access import Access
from firsttoken.petals.contacts import Exchanged, encode_exchange, exchange
from firsttoken.petals.keys import public_hex
from firsttoken.petals.records import Record

NOW = 1_000_000.0


def keyed(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


def record(number: int, now: float = NOW, **changed) -> Record:
    made = Record(public_hex(keyed(number)), f"127.0.0.1:{4000 + number}", (0, 6), "a" * 64, 100.0, now, now, now + 30)
    return replace(made, **changed).signed(keyed(number))


async def said(address: str, own: Record, access: Access | None = None) -> Exchanged:
    """What the member at ``address`` says to the server of ``own``, over a connection of its own."""
    access = access or Access()
    async with access.channel(address, 32) as channel:
        return await exchange(channel, access, encode_exchange([own], own.server), 20.0)
