"""The places of a server: so many sessions at once, and a bounded queue in which points buy the next one (PETALS,
section 4, incentives).

An offer is taken from its owner's account when it enters the queue, and given back to who leaves it without a place. A
place that is free costs nothing. Points are those of this server's own ledger: nobody else is asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from firsttoken.study.errors import BusyError, SwarmError
from firsttoken.study.foreign.faults import Damaged
from firsttoken.study.foreign.json_text import parse_json
from firsttoken.study.foreign.schema import shaped
from firsttoken.swarm.keys import public_hex
from firsttoken.swarm.trust.ledger import Ledger, Order, signed_slip

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

OFFER = "swarm-offer"
"""The header that a session may be opened with: an order of this purpose, as JSON."""


@dataclass(frozen=True)
class Bid:
    """What a client offers each server for a place that is not free: ``points`` of the account of ``key``."""

    key: Ed25519PrivateKey
    points: int

    def headers(self, server: str) -> tuple[tuple[str, str], ...]:
        """For one session with ``server`` (its subkey); numbered by the clock, so that the next one counts, too."""
        number = time.time_ns() // 1000
        order = signed_slip(Order(public_hex(self.key), server, "offer", self.points, number), self.key)
        return ((OFFER, json.dumps(asdict(order))),)


@dataclass(frozen=True, eq=False)
class _Offered:
    points: int
    owner: str
    called: asyncio.Future[None]


class Places:
    """``most`` at once; ``waiting`` may wait for one, the highest offer first, of equal ones who came first."""

    def __init__(self, most: int, waiting: int, ledger: Ledger) -> None:
        self.most, self.waiting, self.ledger = most, waiting, ledger
        self.taken = 0
        self._queue: list[_Offered] = []

    def check_free(self) -> None:
        """Raise BusyError where there is no place."""
        if self.taken >= self.most:
            raise BusyError(f"{self.taken} sessions are open here, and no more are taken")

    async def take(self, offer: str) -> None:
        """Take a place, now or when one is given back and no higher ``offer`` (JSON, "" for none) waits.

        Raises BusyError where the queue is full of offers as high, or a higher one comes; SwarmError for an offer that
        is none, forged, replayed, or beyond its owner's points with this server.
        """
        if self.taken < self.most:
            self.taken += 1
            return
        order = _read(offer) if offer else None
        points = order.points if order is not None else 0
        full = len(self._queue) >= self.waiting
        if full and (not self.waiting or points <= self._queue[-1].points):
            self.check_free()
        if order is not None:
            self.ledger.carry_out(order, "offer")
        if full:
            outbid = BusyError(f"{self.taken} sessions are open here, and others offer more for the next place")
            self._queue.pop().called.set_exception(outbid)
        mine = _Offered(points, order.owner if order is not None else "", asyncio.get_running_loop().create_future())
        self._queue.append(mine)
        self._queue.sort(key=lambda one: -one.points)  # stable: of equal offers the first to come stays first
        try:
            await mine.called
        except BaseException:
            if mine in self._queue:
                self._queue.remove(mine)
            elif mine.called.done() and not mine.called.cancelled() and mine.called.exception() is None:
                self.give()  # called, and gone at the same moment
            if points:
                self.ledger.refund(mine.owner, points)
            raise

    def give(self) -> None:
        """A place is free again, or the next one's who waits."""
        while self._queue:
            if not (called := self._queue.pop(0).called).done():
                called.set_result(None)
                return
        self.taken -= 1

    def dismiss(self, why: Exception) -> None:
        """Who waits hears ``why``, and has its offer back."""
        while self._queue:
            if not (called := self._queue.pop().called).done():
                called.set_exception(why)


def _read(offer: str) -> Order:
    try:
        return shaped(Order, parse_json(offer))
    except (Damaged, ValueError) as error:
        raise SwarmError(f"an offer cannot be read: {error}") from error
