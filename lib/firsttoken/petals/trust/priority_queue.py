"""The places of a server: so many sessions at once, and a bounded queue in which points buy the next one (PETALS,
section 4, incentives).

An offer is taken from its owner's account when it enters the queue, and given back to who leaves it without a place. A
place that is free costs nothing. Points are those of this server's own ledger: nobody else is asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from firsttoken.petals.fairness import HERE, Client, busy
from firsttoken.petals.keys import ServerKey, public_hex, read_said
from firsttoken.petals.trust.ledger import Ledger, Order, signed_slip

OFFER = "swarm-offer"
"""The header that a session may be opened with: an order of this purpose, as JSON."""


@dataclass(frozen=True)
class Bid:
    """What a client offers each server for a place that is not free: ``points`` of the account of ``key``."""

    key: ServerKey
    points: int

    def headers(self, server: str) -> tuple[tuple[str, str], ...]:
        """Return the headers for one session with ``server`` (its subkey).

        The order is numbered by the clock, so that the next one counts, too.
        """
        number = time.time_ns() // 1000
        order = signed_slip(Order(public_hex(self.key), server, "offer", self.points, number), self.key)
        return ((OFFER, json.dumps(asdict(order))),)


@dataclass(frozen=True, eq=False)
class _Offered:
    points: int
    owner: str
    client: Client
    before: int  # how many its client has, of places and of those that wait
    called: asyncio.Future[None]

    @property
    def order(self) -> tuple[int, int]:
        return -self.points, self.before


class PriorityQueue:
    """``most`` at once; ``waiting`` may wait for one, the highest offer first, of equal ones the client that has least,
    then who came first."""

    def __init__(self, most: int, waiting: int, ledger: Ledger) -> None:
        self.most, self.waiting, self.ledger = most, waiting, ledger
        self.taken = 0
        self._queue: list[_Offered] = []

    def check_free(self, spare: Iterable[float] = ()) -> None:
        """Raise BusyError where there is no place; ``spare`` are seconds until this or that may be given up."""
        if self.taken >= self.most:
            raise busy(f"{self.taken} sessions are open here, and no more are taken", spare)

    async def take(self, offer: str, client: Client = HERE, has: int = 0, spare: Iterable[float] = ()) -> None:
        """Take a place for ``client``, which ``has`` so many, now or when one is given back and no higher ``offer``
        (JSON, "" for none) waits.

        Raises BusyError where the queue is full of offers as high, or a higher one comes; SwarmError for an offer that
        is none, forged, replayed, or beyond its owner's points with this server.
        """
        if self.taken < self.most:
            self.taken += 1
            return
        order = read_said(Order, offer, "an offer cannot be read") if offer else None
        points, owner = (order.points, order.owner) if order is not None else (0, "")
        before = has + sum(one.client == client for one in self._queue)
        mine = _Offered(points, owner, client, before, asyncio.get_running_loop().create_future())
        full = len(self._queue) >= self.waiting
        if full and (not self.waiting or mine.order >= self._queue[-1].order):
            self.check_free(spare)
        if order is not None:
            self.ledger.carry_out(order, "offer")
        if full:
            last = self._queue.pop()
            why = "offer more for the next place" if last.points < points else "have fewer, and wait for the next place"
            if not last.called.done():
                last.called.set_exception(busy(f"{self.taken} sessions are open here, and others {why}", spare))
        self._queue.append(mine)
        self._queue.sort(key=lambda one: one.order)  # stable: of equal ones the first to come stays first
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
        """Raise ``why`` for all clients that wait; their offers are given back."""
        while self._queue:
            if not (called := self._queue.pop().called).done():
                called.set_exception(why)
