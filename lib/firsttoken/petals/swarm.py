"""A swarm as a client knows it: who serves which blocks, how far away each is, and whom not to ask for a while."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from firsttoken.petals.access import Access, Channel
from firsttoken.petals.addresses import check_name, host_of, is_loopback
from firsttoken.petals.contacts import Contacts
from firsttoken.petals.messages import ADAPTER
from firsttoken.petals.records import Record, Registry, steady_s
from firsttoken.petals.routing import Hop, best_chain, chain_s
from firsttoken.petals.server_session import ServerSession
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study.errors import SwarmError

# How servers have behaved towards a client: who failed is not asked for a while, and who is late is told from others.
#
# Who fails again is left alone for twice as long. A client that has nobody else for a block asks it sooner, after a
# rest that grows with every failure, so that a server that is well again is found while the client still waits.

TIMES = 3  # "several times" slower than announced, and than others
_REST_S = 0.05  # after the first failure
_LONGEST = 10  # times ``ban_s``
_LOST = 3  # times within ``ban_s`` that a server may lose a session without fault
_STEPS, _LATE_STEPS = 8, 2  # of so many steps so many have to be late: one may be anybody's hiccup


@dataclass
class _Behaviour:
    failures: int = 0
    failed_s: float = 0.0  # when it did so last, on the monotonic clock
    back_s: float = 0.0  # when it answered again after a silence
    lost_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LOST))
    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))


class ServerConduct:
    """The behaviour of each server, by subkey, as a client with these ``timeouts`` remembers it."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._behaviours: dict[str, _Behaviour] = {}

    def failed(self, server: str) -> None:
        """Note that the server could not go on, refused, gave an impossible answer, or was much too late."""
        behaviour, now = self._behaviours.setdefault(server, _Behaviour()), time.monotonic()
        if now - behaviour.failed_s > 2 * self._ban_s(behaviour.failures):
            behaviour.failures = 0
        behaviour.failures, behaviour.failed_s = behaviour.failures + 1, now
        behaviour.late_s.clear()

    def back(self, server: str) -> None:
        """Note that the server was silent and answers again, so that its earlier fault may be over."""
        if (behaviour := self._behaviours.get(server)) is not None:
            behaviour.back_s = time.monotonic()

    def lost(self, server: str) -> bool:
        """Note that the server has lost a session, and return whether it does so too often to be without fault."""
        behaviour, now = self._behaviours.setdefault(server, _Behaviour()), time.monotonic()
        often = len(behaviour.lost_s) == _LOST and now - behaviour.lost_s[0] < self._timeouts.ban_s
        behaviour.lost_s.append(now)
        return often

    def took(self, server: str, seconds: float, announced_s: float) -> None:
        """Note that a step took ``seconds`` where the server's ping and throughput had announced ``announced_s``."""
        late_s = seconds - announced_s
        late = late_s > max(self._timeouts.late_s, (TIMES - 1) * announced_s)
        self._behaviours.setdefault(server, _Behaviour()).late_s.append(late_s if late else 0.0)

    def late_s(self, server: str) -> float:
        """Seconds that a step takes beyond what the server announced; 0 for one that is not late again and again."""
        behaviour = self._behaviours.get(server)
        if behaviour is None or sum(delay_s > 0 for delay_s in behaviour.late_s) < _LATE_STEPS:
            return 0.0
        return sum(behaviour.late_s) / len(behaviour.late_s)

    def shunned(self) -> set[str]:
        """Return the servers that are not asked where another has their blocks. Any thread may call this."""
        return self._failed_within(self._ban_s)

    def resting(self) -> set[str]:
        """Return the servers that are not asked at all. That is for at most a quarter of the time in which a server is
        looked for: some tries fit in it."""
        most_s = self._timeouts.find_s / 4
        return self._failed_within(lambda failures: min(_REST_S * 2 ** (failures - 1), most_s))

    def _failed_within(self, seconds: Callable[[int], float]) -> set[str]:
        now = time.monotonic()
        return {
            server
            for server, behaviour in list(self._behaviours.items())
            if behaviour.failed_s > behaviour.back_s and now - behaviour.failed_s < seconds(behaviour.failures)
        }

    def _ban_s(self, failures: int) -> float:
        return min(2 ** (failures - 1), _LONGEST) * self._timeouts.ban_s


_SEEN = 8  # things that are said of what was seen
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5  # between two looks for somebody who serves what nobody does


class Swarm:
    """The servers of ``model`` (sha256) that the members at ``peers`` (HOST:PORT) tell of. Lives in one event loop.

    Its hidden states are ``width`` wide, and ``trained`` layers are trained through at most.
    """

    def __init__(
        self, model: str, peers: Sequence[str], width: int, access: Access, timeouts: Timeouts, trained: int = 0
    ) -> None:
        if not peers:
            raise SwarmError("a swarm is found by one of its servers: name HOST:PORT")
        self.model = model
        self.peers = list(peers)
        self.registry = Registry()
        self.contacts = Contacts(self.registry, access, width)
        self.contacts.near = any(is_loopback(host_of(peer)) for peer in peers)
        self.timeouts = timeouts
        self.access = access
        self._width, self._trained = width, trained
        self._channels: dict[str, Channel] = {}
        self._pings: dict[str, float] = {}  # by address, of those that answered when they were asked last
        self.conduct = ServerConduct(timeouts)
        self.convicted: set[str] = set()  # subkeys of who was shown to have lied: they are not asked any more

    async def keep_refreshing(self) -> None:
        """Look the swarm over again and again, until cancelled."""
        while True:
            await asyncio.sleep(self.timeouts.refresh_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Ask all members that are known for the others, and how far away they are; new ones in the same look."""
        contacted, first = set(), {*self.peers, *(record.address for record in self._records())}
        while new := first - contacted:
            contacted |= new
            await asyncio.gather(*map(self._ask, new))
            first = {*(record.address for record in self._records()), *self.contacts.due(contacted)}
        for address in self._channels.keys() - contacted:
            await self.reconnect(address)

    async def connect(self) -> None:
        """Look for the first time. Raises SwarmError when nobody answers at the addresses given, and why."""
        await self.refresh()
        if not any(address in self._pings for address in self.peers):
            await self.close()
            whys = "; ".join(f"{peer}: {self.contacts.faults.get(peer, 'it does not answer')}" for peer in self.peers)
            raise SwarmError(
                f"no server of a swarm answers at {', '.join(self.peers)}: name HOST:PORT of one that runs ({whys})"
            )

    def servers(self, adapter: str = "") -> list[Record]:
        """Return the model's servers that have proven their address, answered when last asked and are not convicted;
        those alone that announce the ``adapter``, if one is named."""
        present = [
            record
            for record in self._records()
            if record.address in self._pings and record.server not in self.convicted
        ]
        return [record for record in present if not adapter or adapter in record.adapters]

    async def check(self, layers: range, adapter: str = "") -> None:
        """Raises SwarmError when nobody answers at the addresses given, or one of ``layers`` is served by nobody (with
        the ``adapter``, if one is named).

        Servers that have just begun may not be known yet: the swarm is looked over for ``answer_s`` seconds.
        """
        await self.connect()
        until = time.monotonic() + self.timeouts.answer_s
        while not self._covers(layers, set(), adapter) and time.monotonic() < until:
            await asyncio.sleep(_PAUSE_S)
            await self.refresh()
        self._best(layers, set(), adapter)

    async def route(
        self, layers: range, why: str = "", until: float | None = None, without: Collection[str] = (), adapter: str = ""
    ) -> list[tuple[Hop, Record]]:
        """The fastest chain through ``layers``, of servers with the ``adapter``; at once where one is known.

        Else the swarm is looked over until there is one: of servers that failed lately and answer again, if need be.
        Raises SwarmError after ``find_s`` seconds, or at ``until`` (monotonic clock), with the ``why`` of the last
        failure. Who is in ``without``, as it has refused just this, is not asked; where nobody else has the blocks,
        that is said at once.
        """
        find_s, pause_s, looked = self.timeouts.find_s, _PAUSE_S, False
        until, without = time.monotonic() + find_s if until is None else until, set(without)
        while True:
            for shunned in [self.conduct.shunned(), self.conduct.resting()][: 1 + looked]:
                with suppress(SwarmError):
                    return self._best(layers, shunned | without, adapter)
            if looked and without and not self._covers(layers, without, adapter):
                raise SwarmError(f"{why} (no other server that answers has blocks {layers.start} to {layers.stop - 1})")
            if time.monotonic() > until:
                break
            if looked:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S, find_s / 8)
            await self.refresh()
            looked = True
        try:
            self._best(layers, without, adapter)
        except SwarmError as error:
            raise SwarmError(f"{error} (waited {find_s:g} s{'; ' + why if why else ''})") from None
        why = why or f"whoever has blocks {layers.start} to {layers.stop - 1} failed lately"
        raise SwarmError(f"{why} (the servers that took over failed too, for {find_s:g} s)")

    def faster(self, record: Record, layers: range, adapter: str = "") -> bool:
        """Return whether others would bring a token through ``layers`` several times as fast as the server of
        ``record``, which is late again and again."""
        if not (late_s := self.conduct.late_s(record.server)):
            return False
        try:
            others = self._best(layers, self.conduct.shunned() | {record.server}, adapter)
        except SwarmError:
            return False
        return TIMES * chain_s([hop for hop, _ in others]) < self.announced_s(record, layers, 1) + late_s

    def announced_s(self, record: Record, layers: range, tokens: int) -> float:
        """Seconds of ``tokens`` through ``layers`` by what the server of ``record`` says and how far away it is."""
        server = record.reachable(self._pings.get(record.address, 0.0))
        return chain_s([Hop(server, layers)], tokens)

    def channel(self, address: str) -> Channel:
        """The connection to ``address``, made when it is first asked for."""
        if address not in self._channels:
            self._channels[address] = self.access.channel(address, self._width, self._trained)
        return self._channels[address]

    def open_session(self, record: Record, layers: range, coding: str, adapter: str = "") -> ServerSession:
        """A session with the server of ``record``, for ``layers`` among its blocks, with an ``adapter`` that it has."""
        headers = self.access.headers + (((ADAPTER, adapter),) if adapter else ())
        channel = self.channel(record.address)
        return ServerSession(record.name, channel, layers, self.model, coding, self.timeouts, headers)

    async def reconnect(self, address: str) -> None:
        """Give the connection to ``address`` up: another is made when it is asked for."""
        if (channel := self._channels.pop(address, None)) is not None:
            await channel.close()

    async def close(self) -> None:
        for address in list(self._channels):
            await self.reconnect(address)

    def unseen(self) -> str:
        """Describe the members of the swarm that serve nothing here: other models, refused records, silence."""
        now, faults = steady_s(), self.contacts.faults
        others = [record for record in self.registry.live(now) if record.span and record.model != self.model]
        silent = {record.address for record in self._records() if record.address not in self._pings}
        reasons = [f"{len(others)} of another model, as at {others[0].address}"] if others else []
        reasons += [f"{address}: {why}" for address, why in faults.items()]
        reasons += [f"{address} does not answer" for address in silent - faults.keys()]
        reasons += self.contacts.reported_by_others()
        reasons += [f"{who[:8]} was convicted" for who in self.convicted]
        reasons += [f"{who[:8]} failed lately and is not asked for a while" for who in self.conduct.shunned()]
        more = [f"{len(reasons) - _SEEN} more"] if len(reasons) > _SEEN else []
        return "; ".join([*reasons[:_SEEN], *more]) or "no other server"

    def _records(self) -> list[Record]:
        return self.registry.serving(self.model, steady_s())

    def _covers(self, layers: range, without: set[str], adapter: str) -> bool:
        with suppress(SwarmError):
            return bool(self._best(layers, without, adapter))
        return False

    def _best(self, layers: range, without: set[str], adapter: str) -> list[tuple[Hop, Record]]:
        """Return the best chain through ``layers``; a server that is late counts as farther away than its ping says."""
        records = {record.server: record for record in self.servers(adapter)}
        late_s = self.conduct.late_s
        reachable = [
            record.reachable(self._pings[record.address] + late_s(record.server)) for record in records.values()
        ]
        try:
            return [(hop, records[hop.server.name]) for hop in best_chain(reachable, layers, without)]
        except SwarmError as error:
            lacking = f" (with the adapter {adapter[:80]})" if adapter else ""
            raise SwarmError(f"{error}{lacking}; seen: {self.unseen()}") from None

    async def _ask(self, address: str) -> None:
        try:
            if address not in self.peers and self.registry.at(address, steady_s()) is None:
                await check_name(address)
            _, ping_s = await self.contacts.ask(self.channel(address), address, self.timeouts.answer_s)
        except SwarmError as error:
            self._pings.pop(address, None)
            self.contacts.fault(address, str(error))
            return
        if address not in self._pings:
            for record in self._records():
                if record.address == address:
                    self.conduct.back(record.server)
        self._pings[address] = ping_s
