"""The servers that one member knows: the latest record of each server that has proven it, until it expires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from firsttoken.petals.addresses import network_of, spot_of
from firsttoken.petals.records import LONGEST_S, SKEW_S, Record, TwinError
from firsttoken.study.errors import SwarmError

MOST = 512  # records that are kept
_MOST_FLOORS = 4 * MOST
_MOST_FORGED = 4  # records of one teller: who passes more of them on is not listened to


class StaleError(SwarmError):
    """A record that is not newer than the one that is known."""


class UnprovenError(SwarmError):
    """A record that somebody passes on, of a server that has not said it at its address itself."""


class Registry:
    """Holds up to ``MOST`` records, each said to this member by its server at the address that it names.

    Every member of a swarm has a registry. A new server always finds room: where it is full, the network with
    most records loses the one that was longest not heard of.
    """

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}  # by subkey, who was heard of last at the end
        self._spots: dict[str, str] = {}  # by address, the subkey of who answers there
        self._networks: dict[str, str] = {}  # by subkey
        self._floors: dict[str, float] = {}  # the latest issue that was seen of each, as long as a replay could live

    def take(self, record: Record, now: float) -> bool:
        """Believe ``record``, which its server has said at its address; return whether it is news.

        A server that was known at that address is forgotten. Raises SwarmError as ``check``.
        """
        self._forget(now)
        if self._records.get(record.server) == record:
            self._records[record.server] = self._records.pop(record.server)
            return False
        self.check(record, now)
        self._drop(record.server)
        if (before := self._spots.get(spot_of(record.address))) is not None:
            self._drop(before)
        if len(self._records) >= MOST:
            self._drop(self._longest_silent())
        self._records[record.server] = record
        self._spots[spot_of(record.address)] = record.server
        self._networks[record.server] = network_of(record.address)
        self._floors.pop(record.server, None)
        self._floors[record.server] = record.issued
        if len(self._floors) > _MOST_FLOORS:
            del self._floors[next(iter(self._floors))]
        return True

    def check(self, record: Record, now: float) -> None:
        """Raise SwarmError for a record that is forged, expired or of the future; StaleError for one that is older than
        what is known of its server, as a replayed one is; TwinError for one whose key is in use at another address
        since an earlier time. The signature, which takes longest, is looked at last."""
        record.check_time(now)
        if record.issued <= self._floors.get(record.server, 0.0):
            raise StaleError(f"the record of {record.name} is older than the one that is known: it is replayed")
        record.check(now)
        known = self._records.get(record.server)
        if known is None or known.expires <= now or known.address == record.address:
            return
        if known.counted() and known.started < record.started:
            raise TwinError(
                f"the key of {record.name} is in use at {known.address}: give each server a key of its own, or wait "
                f"{known.expires - now:.0f} s for the record of an earlier life to expire"
            )

    def take_all(self, records: Iterable[Record], now: float) -> dict[str, SwarmError]:
        """Believe those of ``records``, which somebody passes on, that renew what is known.

        What is wrong with the others, by subkey: UnprovenError for servers that have not said it here themselves, whose
        signatures are not looked at. After ``_MOST_FORGED`` forged ones no more are.
        """
        wrong: dict[str, SwarmError] = {}
        forged = 0
        for record in records:
            known = self._records.get(record.server)
            try:
                if known == record:
                    continue
                if known is None or known.address != record.address:
                    raise UnprovenError(f"the record of {record.name} was not heard at its address yet")
                if record.issued <= known.issued:
                    raise StaleError(f"the record of {record.name} is older than the one that is known")
                record.check_time(now)
                if forged >= _MOST_FORGED:
                    raise UnprovenError(f"the record of {record.name} came behind {forged} forged ones")
                try:
                    self.take(record, now)
                except SwarmError:
                    forged += 1
                    raise
            except SwarmError as error:
                wrong[record.server] = error
        return wrong

    def knows(self, record: Record, now: float) -> bool:
        """Whether this server has proven this address, and its record there has not expired."""
        known = self._records.get(record.server)
        return known is not None and known.address == record.address and known.expires > now

    def at(self, address: str, now: float) -> Record | None:
        """Return the record of the server that has proven ``address``; None where there is none, or it has expired."""
        known = self._records.get(self._spots.get(spot_of(address), ""))
        return known if known is not None and known.expires > now else None

    def met(self, server: str, now: float) -> bool:
        """Whether the server of this subkey was believed here within the longest life of a record."""
        return self._floors.get(server, 0.0) > now - LONGEST_S - SKEW_S

    def live(self, now: float) -> list[Record]:
        """The records that have not expired, those of servers that leave included."""
        return [one for one in list(self._records.values()) if one.expires > now]  # any thread may ask

    def serving(self, model: str, now: float) -> list[Record]:
        """Return the records of the servers that serve blocks of ``model`` (sha256) now."""
        return [record for record in self.live(now) if record.model == model and record.span]

    def _longest_silent(self) -> str:
        ((largest, _),) = Counter(self._networks.values()).most_common(1)
        return next(server for server in self._records if self._networks[server] == largest)

    def _drop(self, server: str) -> None:
        if (one := self._records.pop(server, None)) is not None:
            del self._spots[spot_of(one.address)], self._networks[server]

    def _forget(self, now: float) -> None:
        for server in [name for name, one in self._records.items() if one.expires <= now]:
            self._drop(server)
        oldest = now - LONGEST_S - SKEW_S  # what was issued before this has expired, whoever sends it again
        self._floors = {name: at for name, at in self._floors.items() if at > oldest}
