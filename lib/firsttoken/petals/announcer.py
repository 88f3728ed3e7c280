"""A server tells the others what it serves, and hears what they do: three times within a record's life.

Every exchange goes both ways, with all members that are known and the addresses that the server was given, so any of
them can be asked for all. Two servers with one key would overwrite each other's record: the later one ends.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from firsttoken.petals.addresses import check_name
from firsttoken.petals.contacts import ANSWER_S, PROVE_S, Contacts, Exchanged, encode_exchange, page_of, proof_of
from firsttoken.petals.keys import ServerKey
from firsttoken.petals.records import Record, TwinError, steady_s
from firsttoken.study.errors import SwarmError

PEERS = 8  # that one round asks beside the addresses given
_SELF_S = 5.0  # within which a server reaches itself at the address that it gives others
_NAMED_S = 0.5  # until a server is met of which others have told
_TICK_S = 1e-6  # that a record is newer than the one before it
_SOON_S = 0.1  # until the next round when nobody did


class Announcer:
    """Keeps ``record`` alive among ``peers`` (HOST:PORT) and in the registry of ``contacts``; ``expiry_s`` is a
    record's life. Where all whom it asks refuse the record, it says so on standard error."""

    def __init__(
        self, record: Record, key: ServerKey, contacts: Contacts, peers: Sequence[str], expiry_s: float
    ) -> None:
        self.record, self._key, self._contacts, self._peers = record, key, contacts, list(peers)
        self._registry, self._expiry_s = contacts.registry, expiry_s
        self._twins: dict[str, TwinError] = {}  # who refused this round's record for another's
        self._refused_s: float | None = None  # since when somebody has, each round
        self._last_warning = ""
        self.announced = asyncio.Event()  # a first round is over
        contacts.serve_at(record.address)

    def update(self, **fields: Any) -> Record:
        """Change these fields of the record; members that exchange with this server from now on hear it."""
        self._renew(replace(self.record, **fields))
        return self.record

    def answer(self, exchange: Exchanged, refused: str) -> bytes:
        """Return the answer to a member's ``exchange``, with the reason why its record was ``refused``."""
        page, after = page_of(self._registry.live(steady_s()), self.record, exchange.after)
        proof = proof_of(self._key, self.record, exchange.nonce) if exchange.nonce else None
        others = [] if exchange.after else self._contacts.refused()
        return encode_exchange(page, self.record.server, after=after, proof=proof, refused=refused, others=others)

    async def exchange_with_all(self) -> set[str]:
        """Exchange with every member that is known, and those of which they tell; the subkeys of who answered."""
        contacted, answered = {self.record.address}, set()
        while True:
            members = [record.address for record in self._registry.live(steady_s()) if record.counted()]
            new = {*self._peers, *members, *self._contacts.due(set(contacted))} - contacted
            if not new:
                return {address for address, _ in answered if address}
            contacted |= new
            answered.update(
                answer for answer in await asyncio.gather(*map(self._exchange_with, new)) if answer is not None
            )

    async def run(self) -> None:
        """Announce until cancelled. Raises SwarmError when a server that started earlier has the same key."""
        round_s, soon_s = self._expiry_s / 3, _SOON_S
        self._renew(self.record)
        await self._reach_itself()
        while True:
            heard = await self.announce()
            self.announced.set()
            until = time.monotonic() + (round_s * random.uniform(0.8, 1.0) if heard else min(soon_s, round_s))
            while (left_s := until - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, _NAMED_S))
                await asyncio.gather(*map(self._exchange_with, self._contacts.due({self.record.address})))
            soon_s = _SOON_S if heard else 2 * soon_s  # whom it was told of may not be up yet

    async def announce(self) -> bool:
        """Announce once; return False when all members that were asked are silent or refuse. Raises as ``run``."""
        self._renew(self.record)
        addresses = self._addresses_to_ask()
        answers = dict(zip(addresses, await asyncio.gather(*map(self._exchange_with, addresses)), strict=True))
        await asyncio.gather(*map(self._exchange_with, self._contacts.due(set(addresses))))  # of whom these have told
        self._check_twins()
        faults = self._contacts.faults
        refused = {
            address: faults.get(address, "it does not answer") if answer is None else answer[1]
            for address, answer in answers.items()
        }
        if taken := not refused or not all(refused.values()):
            self._last_warning = ""
        else:
            whys = "; ".join(f"{address}: {why}" for address, why in refused.items())
            self._warn(f"this server is not known to others; {whys}")
        return taken

    async def leave(self) -> None:
        """Tell the others that this server goes: nobody asks it any more."""
        self.update(blocks=(0, 0), target=(0, 0), wishes=0.0)
        await asyncio.gather(*map(self._exchange_with, self._addresses_to_ask()))

    def _addresses_to_ask(self) -> list[str]:
        members = [record.address for record in self._registry.live(steady_s())]
        addresses = dict.fromkeys([*self._peers, *random.sample(members, min(PEERS, len(members)))])
        return [address for address in addresses if address != self.record.address]

    def _renew(self, record: Record) -> None:
        now = steady_s()
        issued = max(now, self.record.issued + _TICK_S)  # of two that are said at once the later counts
        self.record = replace(record, issued=issued, expires=issued + self._expiry_s).signed(self._key)
        try:
            self._registry.accept(self.record, now)
        except TwinError as error:
            self._twins[self.record.address] = error

    async def _exchange_with(self, address: str) -> tuple[str | None, str] | None:
        """Exchange with the member at ``address``; return its subkey and why it refuses the record of this server, None
        where it does not answer."""
        contacts = self._contacts
        try:
            if address not in self._peers and self._registry.at(address, steady_s()) is None:
                await check_name(address)
            async with contacts.access.channel(address, contacts.width) as channel:
                exchange, _ = await contacts.ask(channel, address, ANSWER_S + PROVE_S, self.record)
        except TwinError as error:
            self._twins[address] = error
            return None, str(error)
        except SwarmError as error:
            contacts.fault(address, str(error))
            return None
        return exchange.server, exchange.refused

    async def _reach_itself(self) -> None:
        """Wait until this server answers at its address, where the others will call it back."""
        contacts, record, wait_s, why = self._contacts, self.record, _SOON_S, ""
        until = time.monotonic() + _SELF_S
        while time.monotonic() < until:
            try:
                async with contacts.access.channel(record.address, contacts.width) as channel:
                    exchange, _ = await contacts.ask(channel, record.address, PROVE_S)
                if exchange.server == record.server:
                    return
                why = f"who answers there is {(exchange.server or 'nobody')[:8]}"
            except SwarmError as error:
                why = str(error)
            await asyncio.sleep(wait_s)
            wait_s *= 2
        self._warn(f"this server does not reach itself at {record.address}, the address that it gives others: {why}")

    def _warn(self, warning: str) -> None:
        """Print ``warning`` on standard error, once for each reason; a reason that differs in its seconds alone is the
        same."""
        if (kind := re.sub(r"\d+(\.\d+)? s", "", warning)) != self._last_warning:
            self._last_warning = kind
            print(warning, file=sys.stderr, flush=True)

    def _check_twins(self) -> None:
        """Raise TwinError where another server uses this key for longer than a record lives: one of an earlier life of
        this server expires by then."""
        now = time.monotonic()
        self._refused_s = (self._refused_s or now) if self._twins else None
        if self._refused_s is not None and now - self._refused_s > self._expiry_s:
            raise next(iter(self._twins.values()))
        self._twins.clear()
