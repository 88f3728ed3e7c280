"""Clients of a server and the share of each: whom a full server takes from, and whose turn it is to be computed.

A client is one connection, and belongs to the host that it comes from. Shares are fair between hosts first, and then
between the connections of one host: who opens more connections takes from its own host alone. Nothing is reserved:
whoever asks alone has everything, and gives up what it has above its share when another asks. What a stranger asks that
costs much, as a call back does, has a share for each place that it asks from: so much at once, and more with time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

from firsttoken.petals.addresses import host_of, ip_of
from firsttoken.study.errors import BusyError

_MOST = 4096  # sources that are known


class Client(NamedTuple):
    """A ``connection`` from a ``host``, as ``client_of`` names them."""

    host: str
    connection: str


HERE = Client("", "")
"""The server itself, which measures and judges."""


def client_of(peer: str) -> Client:
    """The client that gRPC calls ``peer``, such as ipv4:192.0.2.1:5000 or ipv6:[2001:db8::1]:5000.

    All addresses of this machine's loopback are one host, as whoever is here may use any of them. So are the addresses
    of one IPv6 network of 64 bits, which is what one customer is given.
    """
    kind, _, address = unquote(peer).partition(":")
    ip = ip_of(host_of(address).partition("%")[0])
    if ip is None:  # a Unix socket, or a transport without addresses
        return Client(kind, peer)
    if ip.is_loopback:
        return Client("loopback", peer)
    return Client(str(ipaddress.ip_network((ip, 64 if ip.version == 6 else 32), strict=False)), peer)


def client_to_evict(
    held: Mapping[Client, int], asking: Client, wanted: int, among: Collection[Client] | None = None
) -> Client | None:
    """The client that gives something up when ``asking`` wants ``wanted`` more: None where nobody has too much.

    Of all clients that have something ``held`` (or of those ``among``), it has the most and would have more than the
    one that asks would then have. Hosts are compared where the two are of different hosts. Of equals it is the first.
    """
    hosts = Counter[str]()
    for client, count in held.items():
        hosts[client.host] += count

    def too_much(client: Client) -> bool:
        if client.host != asking.host:
            return hosts[client.host] > hosts[asking.host] + wanted
        return client != asking and held.get(client, 0) > held.get(asking, 0) + wanted

    above = [candidate for candidate in (held if among is None else among) if too_much(candidate)]
    return max(above, key=lambda candidate: (hosts[candidate.host], held.get(candidate, 0)), default=None)


def busy(reason: str, spare: Iterable[float]) -> BusyError:
    """Return the error that gives the ``reason`` and the time after which to ask again: ``spare`` are seconds until
    this or that may be given up."""
    after = min(spare, default=math.inf)
    return BusyError(f"{reason}; ask again in {max(after, 0.1):.1f} s" if after < math.inf else reason)


class _VirtualTime:
    """Start-time fair queueing between those that share one thing: ``now`` is the tag at which the last was begun."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: dict[str, float] = {}

    def tag(self, name: str) -> float:
        return max(self.ends.get(name, 0.0), self.now)

    def begin(self, name: str) -> None:
        self.now = self.tag(name)
        self.ends = {other: end for other, end in self.ends.items() if end > self.now}  # the others begin at now


class FairQueue:
    """Chooses the next client by start-time fair queueing (Goyal et al., SIGCOMM 1996), between hosts and between the
    clients of each. The client that had least computed while it waited comes first; unused shares are not saved up."""

    def __init__(self) -> None:
        self._hosts = _VirtualTime()
        self._within: dict[str, _VirtualTime] = {}

    def tag(self, client: Client) -> tuple[float, float]:
        """The lower it is, the sooner is the client's turn."""
        return self._hosts.tag(client.host), self._within.get(client.host, _VirtualTime()).tag(client.connection)

    def next(self, waiting: Collection[Client]) -> Client:
        """Return the client of those ``waiting`` whose turn it is, and begin its turn."""
        client = min(waiting, key=self.tag)
        self._hosts.begin(client.host)
        self._within.setdefault(client.host, _VirtualTime()).begin(client.connection)
        hosts = {turn_client.host for turn_client in waiting} | set(self._hosts.ends)
        self._within = {host: level for host, level in self._within.items() if host in hosts}
        return client

    def charge(self, client: Client, cost: float) -> None:
        """Charge a client for the ``cost`` of what was begun for it."""
        within = self._within.setdefault(client.host, _VirtualTime())
        self._hosts.ends[client.host] = self._hosts.tag(client.host) + cost
        within.ends[client.connection] = within.tag(client.connection) + cost


def remember(entries: dict[str, Any], key: str, value: Any, most: int) -> None:
    """Set ``entries[key]``, as the latest; of more than ``most`` what was set longest ago is forgotten."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]


class TokenBuckets:
    """Each source has ``most`` shares at first, and one more every ``every_s`` seconds until it has as many again."""

    def __init__(self, most: int, every_s: float) -> None:
        self.most, self.every_s = most, every_s
        self._credits: dict[str, tuple[float, float]] = {}  # by source: shares, and when

    def has_token(self, source: str) -> bool:
        """Return whether ``source`` has a share left."""
        return self._now(source) >= 1

    def spend(self, source: str) -> None:
        """Take one of the shares of ``source``. Raises BusyError where it has none."""
        credit = self._now(source)
        if credit < 1:
            raise BusyError(
                f"too much was asked from {source.rpartition(':')[0] or source}: ask again in "
                f"{(1 - credit) * self.every_s:.0f} s"
            )
        remember(self._credits, source, (credit - 1, time.monotonic()), _MOST)

    def refund(self, source: str) -> None:
        """Give the share of ``source`` back, as it was well spent."""
        credit = min(self._now(source) + 1, self.most)
        remember(self._credits, source, (credit, time.monotonic()), _MOST)

    def _now(self, source: str) -> float:
        credit, updated_s = self._credits.get(source, (float(self.most), 0.0))
        return min(credit + (time.monotonic() - updated_s) / self.every_s, self.most)


@dataclass(eq=False)
class CancelScope:
    """A task that others may end with an error of theirs: what it awaits is cancelled, and it raises what they say.

    It is the task that is in the block; ``cancel`` makes the block raise. To be used once, as a context manager.
    """

    why: Exception | None = field(default=None, init=False)
    _task: asyncio.Task | None = field(default=None, init=False)

    def cancel(self, why: Exception) -> None:
        """Raise ``why`` in the block, from another task; the first to say so is heard."""
        if self.why is None and self._task is not None:
            self.why = why
            self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        task, self._task = self._task, None
        if self.why is not None and isinstance(error, asyncio.CancelledError):
            task.uncancel()
            raise self.why from None
