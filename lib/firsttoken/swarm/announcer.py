"""A server tells the others what it serves, and hears what they do: three times within a record's life.

Every exchange goes both ways, with all members that are known and the addresses that the server was given, so any of
them can be asked for all. Two servers with one key would overwrite each other's record: the later one ends.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firsttoken.study.errors import SwarmError
from firsttoken.swarm.access import Access
from firsttoken.swarm.records import Record
from firsttoken.swarm.registry import Registry, TwinError, hear, tell
from firsttoken.swarm.service import EXCHANGE

if TYPE_CHECKING:
    import grpc
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PEERS = 8  # that one round asks beside the addresses given
ANSWER_S = 2.0  # within which they answer
_TICK_S = 1e-6  # that a record is newer than the one before it
_SOON_S = 0.1  # until the next round when nobody did


async def exchange(
    channel: grpc.aio.Channel, access: Access, said: bytes, seconds: float = ANSWER_S
) -> tuple[str | None, list[Record]]:
    """One exchange; the other's subkey and what it knows. Raises SwarmError when it does not answer, or nonsense."""
    import grpc

    try:
        return hear(await channel.unary_unary(EXCHANGE)(said, timeout=seconds, metadata=access.headers))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            raise TwinError(error.details()) from error
        raise SwarmError(error.details() or error.code().name) from error
    except grpc.aio.UsageError as error:
        raise SwarmError(f"the connection was closed: {error}") from error
    except asyncio.CancelledError:  # of the call, as somebody else has given its connection up, or of whoever asks
        if asyncio.current_task().cancelling():
            raise
        raise SwarmError("the connection was closed") from None


class Announcer:
    """Keeps ``record`` alive among ``peers`` (HOST:PORT) and in ``registry``; ``expiry_s`` is a record's life."""

    def __init__(
        self,
        record: Record,
        key: Ed25519PrivateKey,
        registry: Registry,
        peers: Sequence[str],
        access: Access,
        expiry_s: float,
        width: int,
    ) -> None:
        self._record, self._key = record, key
        self._registry, self._peers = registry, list(peers)
        self._access, self._expiry_s, self._width = access, expiry_s, width
        self._twins: dict[str, TwinError] = {}  # who refused this round's record for another's
        self._refused_s: float | None = None  # since when somebody has, each round

    @property
    def record(self) -> Record:
        """What the server says of itself now."""
        return self._record

    def say(self, **said: Any) -> Record:
        """The record with these fields: whoever exchanges with this server from now on hears it."""
        self._renew(replace(self._record, **said))
        return self._record

    async def tell_all(self) -> set[str]:
        """Exchange with every member that is known, and those of which they tell; the subkeys of who answered."""
        asked, answered = {self._record.address}, set()
        while (
            new := {*self._peers, *(one.address for one in self._registry.live(time.time()) if one.counted())} - asked
        ):
            asked |= new
            answered.update(await asyncio.gather(*map(self._meet, new)))
        return answered - {None}

    async def run(self) -> None:
        """Announce until cancelled. Raises SwarmError when a server that started earlier has the same key."""
        round_s, soon_s = self._expiry_s / 3, _SOON_S
        while True:
            heard = await self.announce()
            await asyncio.sleep(round_s * random.uniform(0.8, 1.0) if heard else min(soon_s, round_s))
            soon_s = _SOON_S if heard else 2 * soon_s  # whom it was told of may not be up yet

    async def announce(self) -> bool:
        """One round; False when everybody who was asked is silent. Raises as ``run``."""
        self._renew(self._record)
        known = [one.address for one in self._registry.live(time.time()) if one.address != self._record.address]
        asked = dict.fromkeys([*self._peers, *random.sample(known, min(PEERS, len(known)))])
        asked.pop(self._record.address, None)
        answers = await asyncio.gather(*map(self._meet, asked))
        self._check_twins()
        return any(one is not None for one in answers) or not answers

    async def leave(self) -> None:
        """Tell the others that this server goes: nobody asks it any more."""
        self.say(blocks=(0, 0), target=(0, 0), wishes=0.0)
        await self.announce()

    def _renew(self, record: Record) -> None:
        now = time.time()
        issued = max(now, self._record.issued + _TICK_S)  # the clock may stand, or have been set
        self._record = replace(record, issued=issued, expires=issued + self._expiry_s).signed(self._key)
        try:
            self._registry.take(self._record, now)
        except TwinError as error:
            self._twins[self._record.address] = error

    async def _meet(self, address: str) -> str | None:
        """Exchange with one; the subkey of who answered, "" where it has none."""
        with suppress(SwarmError):
            async with self._access.channel(address, self._width) as channel:
                said = tell(self._registry.live(time.time()), self._record.server)
                try:
                    server, records = await exchange(channel, self._access, said)
                except TwinError as error:
                    self._twins[address] = error
                    return ""
            self._registry.take_all(records, time.time())
            return server or ""
        return None

    def _check_twins(self) -> None:
        """What is left of an earlier life of this server expires; a twin is there again and again."""
        now = time.monotonic()
        self._refused_s = (self._refused_s or now) if self._twins else None
        if self._refused_s is not None and now - self._refused_s > self._expiry_s:
            raise next(iter(self._twins.values()))
        self._twins.clear()
