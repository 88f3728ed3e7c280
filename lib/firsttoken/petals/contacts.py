"""Whom a member asks, and what it believes: a server's own word, said at its own address.

What somebody passes on is a hint where to ask. However many records name an address, each member that they were told
to connects to it once, again after 2 s and 16 s, and then once a minute at most, until a server proves itself there.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from firsttoken.petals.access import Access, Channel
from firsttoken.petals.addresses import check_kind, check_name, is_loopback, spot_of
from firsttoken.petals.fairness import Shares, remember
from firsttoken.petals.messages import MOST_PAGES, Exchanged, exchange, line_of, tell
from firsttoken.petals.records import MOST, Record, Registry, StaleError, TwinError, UnprovenError
from firsttoken.study.errors import BusyError, SwarmError

PROVE_S = 1.5  # within which a server that is called back answers
_AGAIN_S, _AGAIN, _LONGEST_S = 2.0, 8, 60.0  # until an address that did not prove itself is asked again
_FIRST = 64  # addresses that one look asks for the first time
_AT_ONCE = 8  # servers that are called back at once
_MOST_SPOTS = 1 << 16  # addresses of which it is known when they were asked: all ports of loopback
_MOST_FAULTS = 64
_TOLD, _LATELY_S = 8, 60.0  # servers that were refused, as others are told


class Contacts:
    """What one member knows: the ``registry`` of those who have proven themselves, ``faults`` of others by address.

    ``near`` and ``far`` are the addresses it takes: of loopback, and of other machines. ``own`` is where it is itself.
    """

    def __init__(self, registry: Registry, access: Access, width: int) -> None:
        self.registry, self.access, self.width = registry, access, width
        self.near, self.far, self.own = True, access.secure, ""
        self.faults: dict[str, str] = {}
        self.others: dict[str, tuple[str, ...]] = {}  # by who says it, what it holds against others
        self._refused: dict[str, tuple[str, float]] = {}  # by address, of who said so itself: why, and when
        self._hints: dict[str, list[Record]] = {}  # by who passed them on
        self._asked: dict[str, tuple[int, float]] = {}  # by spot: how often in vain, and when again
        self._whys: dict[str, str] = {}  # by spot: why it was called back in vain
        self._strangers = Shares(16, 4.0)
        self._calling = asyncio.Semaphore(_AT_ONCE)

    def is_at(self, address: str) -> None:
        """Note that this member is a server at ``address``, so that others must have addresses of the same kind."""
        self.own = address
        self.near = is_loopback(address.rpartition(":")[0].strip("[]"))
        self.far = self.access.secure and not self.near

    async def ask(
        self, channel: Channel, address: str, limit_s: float, record: Record | None = None
    ) -> tuple[Exchanged, float]:
        """Hear all that the member at ``address`` knows: its first answer, and the seconds until that came; ``record``
        is what this one says of itself.

        Its own record is believed, of others what renews known ones; the rest are hints. Raises SwarmError where nobody
        answers within ``limit_s`` seconds, or nonsense.
        """
        nonce, first, hints, after, seconds = secrets.token_hex(16), None, [], "", 0.0
        said = [record] if record is not None else []
        server = record.server if record is not None else None
        try:
            for _ in range(MOST_PAGES):
                more = {"after": after} if after else {"nonce": nonce}
                begun = time.perf_counter()
                told = await exchange(channel, self.access, tell([] if after else said, server, **more), limit_s)
                if first is None:
                    first, seconds = told, time.perf_counter() - begun
                    self._proven(address, told, nonce)
                hints += self._passed_on(told)
                if told.after <= after:
                    break
                after = told.after
        except SwarmError as error:
            if not isinstance(error, TwinError):
                self.fault(address, str(error))
            if first is None:
                raise
        else:
            self.faults.pop(address, None)
        remember(self.others, address, first.others, _MOST_FAULTS)
        remember(self._hints, address, hints[:MOST], _MOST_FAULTS)
        return first, seconds

    def due(self, asked: set[str]) -> list[str]:
        """The addresses to ask now beside those ``asked``: what others have named since, of each in turn."""
        lists, due = list(self._hints.values()), []
        self._hints.clear()
        for place in range(max(map(len, lists), default=0)):
            for address in (hints[place].address for hints in lists if place < len(hints)):
                if len(due) + len(asked) < _FIRST and address not in asked and self._may_ask(address):
                    self.tried(address)
                    due.append(address)
        return due

    def _may_ask(self, address: str) -> bool:
        spot = spot_of(address)
        if spot == spot_of(self.own) or self.registry.at(address, time.time()) is not None:
            return False
        try:
            check_kind(address, self.near, self.far)
        except SwarmError as error:
            self.fault(address, str(error))
            return False
        return self._asked.get(spot, (0, 0.0))[1] <= time.monotonic()

    def tried(self, address: str) -> None:
        """Note that this address is asked now; if it does not prove itself, it is left alone for a while."""
        spot, now = spot_of(address), time.monotonic()
        times, _ = self._asked.get(spot, (0, 0.0))
        again_s = now + min(_AGAIN_S * _AGAIN ** min(times, 8), _LONGEST_S)
        remember(self._asked, spot, (times + 1, again_s), _MOST_SPOTS)

    async def hear_of(self, record: Record, source: str) -> str:
        """Hear from ``source`` that it is the server of ``record``; return why it is not believed, "" if it is.

        A new server is called back. Raises TwinError as the registry.
        """
        now = time.time()
        try:
            if not self.registry.knows(record, now) or not self._strangers.left(source):
                self._strangers.take(source)
            await self._check(record, source, now)
        except TwinError:
            raise
        except StaleError:
            return ""  # what is known of it is later
        except (SwarmError, BusyError) as error:
            remember(self._refused, record.address, (line_of(str(error)), time.monotonic()), _MOST_FAULTS)
            return line_of(str(error))
        self._refused.pop(record.address, None)
        return ""

    def held_against(self) -> list[str]:
        """What other members hold against servers that have said to them that they are there."""
        return [f"{teller} refuses {line}" for teller, lines in self.others.items() for line in lines]

    def refused(self) -> list[str]:
        """What is held against servers that have said lately that they are there, the latest last."""
        lately = time.monotonic() - _LATELY_S
        return [line_of(f"{at}: {why}") for at, (why, when) in self._refused.items() if when > lately][-_TOLD:]

    async def _check(self, record: Record, source: str, now: float) -> None:
        if self.registry.knows(record, now):
            try:
                self.registry.take(record, now)
            except StaleError:
                raise
            except SwarmError:
                self._strangers.take(source)  # forged: the next one costs this source, too
                raise
            return
        record.check_time(now)
        check_kind(record.address, self.near, self.far)
        if spot_of(record.address) == spot_of(self.own):
            raise SwarmError(f"{record.address} is this server's own address: name your own with --address")
        self.registry.check(record, now)
        if not (record.span or record.counted()):
            return  # who leaves, and was never known
        _, due = self._asked.get(spot := spot_of(record.address), (0, 0.0))
        if due > time.monotonic():
            why = self._whys.get(spot, f"{record.address} has not answered yet")
            raise SwarmError(f"{why} (it is called back again in {due - time.monotonic():.0f} s)")
        self.tried(record.address)
        try:
            await self._call_back(record)
        except SwarmError as error:
            remember(self._whys, spot, str(error), _MOST_FAULTS)
            raise

    async def _call_back(self, record: Record) -> None:
        address = record.address
        try:
            async with asyncio.timeout(PROVE_S):
                async with self._calling:
                    await check_name(address)
                    async with self.access.channel(address, self.width) as channel:
                        told, _ = await self.ask(channel, address, PROVE_S)
        except TimeoutError:
            raise SwarmError(f"{address} did not answer within {PROVE_S:g} s when it was called back") from None
        except SwarmError as error:
            raise SwarmError(f"{address} does not answer when it is called back: {error}") from error
        if told.server != record.server or not self.registry.knows(record, time.time()):
            raise SwarmError(f"another server than {record.server[:8]} answers at {address}: mend --address")

    def _proven(self, address: str, told: Exchanged, nonce: str) -> None:
        """Believe what who answers at ``address`` says of itself, if it is its address."""
        if told.server is None:
            return
        told.check_proof(nonce)
        own = next((one for one in told.records if one.server == told.server), None)
        if own is None or spot_of(own.address) != spot_of(address):
            return
        try:
            self.registry.take(own, time.time())
        except StaleError:
            if not self.registry.knows(own, time.time()):
                raise
        self._asked.pop(spot_of(address), None)

    def _passed_on(self, told: Exchanged) -> list[Record]:
        wrong = self.registry.take_all(told.records, time.time())
        for one in told.records:
            error = wrong.get(one.server)
            if error is not None and not isinstance(error, UnprovenError | StaleError):
                self.fault(one.address, str(error))
        return [one for one in told.records if isinstance(wrong.get(one.server), UnprovenError)]

    def fault(self, address: str, said: str) -> None:
        """Note that the member at ``address`` does not count, and the reason ``said``."""
        remember(self.faults, address, line_of(said), _MOST_FAULTS)
