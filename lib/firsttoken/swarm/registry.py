"""Who serves what, as one member knows it: the latest record of each server, until it expires."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from firsttoken.study.errors import SwarmError
from firsttoken.study.foreign.faults import Damaged
from firsttoken.study.foreign.json_text import parse_json
from firsttoken.study.foreign.schema import digits, shaped
from firsttoken.swarm.records import LONGEST_S, SKEW_S, Record, read_record

MOST = 512  # records that are kept, and that a message may hold


class StaleError(SwarmError):
    """A record that is not newer than the one that is known."""


class TwinError(SwarmError):
    """Two servers announce under one key."""


class Registry:
    """At most ``MOST`` records. Every member of a swarm has one; ``take`` of each other's makes them equal."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._floors: dict[str, float] = {}  # the latest issue that was seen of each, as long as a replay could live

    def take(self, record: Record, now: float) -> bool:
        """Believe ``record``; whether it is news.

        Raises SwarmError for one that is forged, expired or of the future, or when there are too many; StaleError for
        one that is older than what is known of its server, as a replayed one is; TwinError for one whose key is in use
        at another address since an earlier time.
        """
        self._forget(now)
        known = self._records.get(record.server)
        if known == record:
            return False
        record.check(now)
        if known is not None and known.address != record.address and known.counted() and known.started < record.started:
            raise TwinError(
                f"the key of {record.name} is in use at {known.address}: give each server a key of its own, or wait "
                f"{known.expires - now:.0f} s for the record of an earlier life to expire"
            )
        if record.issued <= self._floors.get(record.server, 0.0):
            raise StaleError(f"the record of {record.name} is older than the one that is known: it is replayed")
        if record.server not in self._floors and len(self._floors) >= MOST:
            raise SwarmError(f"{MOST} servers are known here; the record of {record.name} finds no room")
        self._records[record.server] = record
        self._floors[record.server] = record.issued
        return True

    def take_all(self, records: Iterable[Record], now: float) -> dict[str, SwarmError]:
        """Believe those of ``records`` that can be; what is wrong with the others, by subkey."""
        wrong: dict[str, SwarmError] = {}
        for record in records:
            try:
                self.take(record, now)
            except SwarmError as error:
                wrong[record.server] = error
        return wrong

    def live(self, now: float) -> list[Record]:
        """The records that have not expired, those of servers that leave included."""
        return [one for one in list(self._records.values()) if one.expires > now]  # any thread may ask

    def serving(self, model: str, now: float) -> list[Record]:
        """Who serves blocks of ``model`` (sha256) now."""
        return [record for record in self.live(now) if record.model == model and record.span]

    def _forget(self, now: float) -> None:
        self._records = {name: one for name, one in self._records.items() if one.expires > now}
        oldest = now - LONGEST_S - SKEW_S  # what was issued before this has expired, whoever sends it again
        self._floors = {name: at for name, at in self._floors.items() if at > oldest}


@dataclass(frozen=True)
class _ToldRecords:
    server: Annotated[str, digits(64)] | None
    records: tuple[dict, ...]


def tell(records: Iterable[Record], server: str | None = None) -> bytes:
    """What one member says to another: its own subkey, None for a client, and what it knows."""
    return json.dumps({"server": server, "records": [record.as_dict() for record in records]}).encode()


def hear(data: bytes) -> tuple[str | None, list[Record]]:
    """What was said. Raises SwarmError for no such message, or one of more than ``MOST`` records."""
    try:
        told = shaped(_ToldRecords, parse_json(data))
    except (Damaged, ValueError) as error:
        raise SwarmError(f"an exchange of records cannot be read: {error}") from error
    if len(told.records) > MOST:
        raise SwarmError(f"an exchange of {len(told.records)} records; at most {MOST} are taken")
    return told.server, [read_record(value) for value in told.records]
