"""What a server says of itself, signed with its key: nobody else can say it, and it is forgotten in time. And what one
member believes of this: the latest record of each server that has proven its address, until it expires."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from firsttoken.assets.model_config import MOST_LAYERS
from firsttoken.petals.addresses import fault_of, network_of, spot_of
from firsttoken.petals.fairness import remember
from firsttoken.petals.keys import ServerKey, check_signature, signature_of
from firsttoken.petals.routing import Reachable
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.parse_errors import ParseError, shown
from firsttoken.study.parsing.schema import at_least, between, digits, parse_as

LONGEST_S = 300.0  # that a record may live
_DOMAIN = b"firsttoken swarm record 2\n"
_Block = Annotated[int, between(0, MOST_LAYERS)]
MOST_ADAPTERS = 16  # of a server: a record is one message
_ADAPTER = re.compile(r"[\w.-]{1,64}@[0-9a-f]{64}", re.ASCII)
MOST = 512  # records that a member keeps
_MOST_MET = 4 * MOST
_MOST_FORGED = 4  # records of one teller: who passes more of them on is not listened to


_BEGUN_S = time.time() - time.monotonic()


def steady_s() -> float:
    """The time [s] by which members count: the wall clock when this process began, and what has passed since. Whoever
    sets the wall clock moves it neither forwards nor back."""
    return _BEGUN_S + time.monotonic()


def adapter_name(name: str, sha256: str) -> str:
    """Return the name that servers and clients use for this adapter: both name and files have to be the same."""
    return f"{name}@{sha256}"


def adapters_fault(value: tuple[str, ...]) -> str:
    """Return what is wrong with the names of a server's adapters, "" where they can be announced."""
    fits = len(value) <= MOST_ADAPTERS and all(map(_ADAPTER.fullmatch, value))
    return "" if fits else f"expected at most {MOST_ADAPTERS} adapters as NAME@SHA256"


class TwinError(SwarmError):
    """Two servers announce under one key."""


class StaleRecordError(SwarmError):
    """A record that is not newer than the one that is known."""


class UnprovenRecordError(SwarmError):
    """A record that somebody passes on, of a server that has not said it at its address itself."""


@dataclass(frozen=True)
class Record:
    """A server's announcement: under its subkey ``server`` (its Ed25519 public key, hex) nobody else can write.

    It holds ``blocks`` [start, stop) of ``model`` (sha256), computes ``throughput`` tokens a second through one block,
    and runs since ``started``. Of two records of a run the later ``issued`` counts, until it ``expires``; all are
    seconds of its server's own steady clock, and another's may be an hour off. One that ``moves`` may take other
    blocks: since ``wishes`` it means to hold ``target``, and with no ``blocks`` it loads them. Equal ends of both: the
    server leaves. It also computes its blocks with each of the ``adapters`` (``adapter_name``).
    """

    server: Annotated[str, digits(64)]
    address: Annotated[str, fault_of]
    blocks: tuple[_Block, _Block]
    model: Annotated[str, digits(64)]
    throughput: Annotated[float, between(0.0, 1e12)]
    started: Annotated[float, at_least(0.0)]
    issued: Annotated[float, at_least(0.0)]
    expires: Annotated[float, at_least(0.0)]
    moves: bool = False
    target: tuple[_Block, _Block] = (0, 0)
    wishes: Annotated[float, at_least(0.0)] = 0.0
    adapters: Annotated[tuple[str, ...], adapters_fault] = ()
    signature: Annotated[str, digits(128)] = "0" * 128

    @property
    def span(self) -> range:
        """The range of blocks that the server serves."""
        return range(*self.blocks)

    @property
    def run(self) -> tuple[str, float]:
        """Return where the server is and since when: another run of it may count by another clock."""
        return self.address, self.started

    @property
    def life_s(self) -> float:
        """The seconds for which the record counts."""
        return self.expires - self.issued

    @property
    def turn(self) -> tuple[float, str]:
        """The place among servers that mean to move: of two the lower one goes, and the other asks itself again."""
        return self.wishes, self.server

    def counted(self, turn: tuple[float, str] | None = None) -> range:
        """Return the blocks with which the server counts for one that means to move: those that it means to hold,
        unless its turn comes behind ``turn``. A server that leaves has none."""
        later = turn is not None and self.span and self.turn > turn
        return self.span if later or not range(*self.target) else range(*self.target)

    @property
    def name(self) -> str:
        """Return the server's name in messages: the first digits of its key, and its address."""
        return f"{self.server[:8]} at {self.address}"

    def signed(self, key: ServerKey) -> Record:
        """Return this record with the signature of its server's ``key``."""
        return replace(self, signature=signature_of(key, _DOMAIN, self.as_dict()))

    def check(self) -> None:
        """Raise SwarmError unless its server signed it, and ``check_life``."""
        self.check_life()
        check_signature(self.server, _DOMAIN, self.as_dict(), f"the record of {self.name}")

    def check_life(self) -> None:
        """Raise SwarmError where its blocks end before they begin, or it lives longer than records do.

        This is what costs nothing: it is asked before the signature is.
        """
        backwards = self.blocks[0] > self.blocks[1] or self.target[0] > self.target[1]
        if backwards or not 0 < self.life_s <= LONGEST_S:
            raise SwarmError(f"the record of {self.name} has no blocks, or a life of more than {LONGEST_S:.0f} s")

    def reachable(self, ping_s: float, blocks: range | None = None) -> Reachable:
        """The server as routes are searched, or as one of other ``blocks``."""
        return Reachable(self.server, blocks or self.span, ping_s, max(self.throughput, 1e-9), not self.moves)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, without adapters where there are none, which older members do not know."""
        return {key: value for key, value in asdict(self).items() if key != "adapters" or value}

    @cached_property
    def text(self) -> str:
        """The record as it is sent: JSON, which a member makes once however many ask for it."""
        return json.dumps(self.as_dict())


def read_record(value: Any) -> Record:
    """A record as JSON gives it, unchecked. Raises SwarmError for what is none."""
    try:
        return parse_as(Record, value)
    except ParseError as error:
        raise SwarmError(f"{shown(value)} is no record of a server: {error}") from error


class _Believed(NamedTuple):
    record: Record
    network: str
    ahead_s: float  # of this member's steady clock, by which its server's is at most
    until: float  # by this member's clock


class Registry:
    """Holds up to ``MOST`` records, each said to this member by its server at the address that it names.

    Every member of a swarm has a registry. A new server always finds room: where it is full, the network with
    most records loses the one that was longest not heard of. Each ``now`` is this member's ``steady_s``, and a record
    counts for its life from when it was issued, as far as its server's own word has shown what that clock says: clocks
    of members need not agree.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Believed] = {}  # by subkey, who was heard of last at the end
        self._spots: dict[str, str] = {}  # by address, the subkey of who answers there
        self._met: dict[str, float] = {}  # by subkey, when it was believed last

    def accept(self, record: Record, now: float) -> bool:
        """Believe ``record``, which its server says now at its address; return whether it is news.

        A server that was known at that address is forgotten. Raises SwarmError as ``check``.
        """
        self._forget(now)
        entry = self._entries.get(record.server)
        if entry is not None and entry.record == record:
            self._entries[record.server] = self._entries.pop(record.server)
            return False
        self.check(record, now)
        ahead_s = record.issued - now
        if entry is not None and entry.record.run == record.run and entry.ahead_s - ahead_s < record.life_s:
            ahead_s = max(ahead_s, entry.ahead_s)  # the least time that one of its records took to come here
        self._believe(record, ahead_s, now)
        return True

    def renew(self, record: Record, now: float) -> None:
        """Believe ``record``, which anybody passes on, where it renews what its server has said here itself.

        Raises UnprovenRecordError where it does not, or is older than its life by that server's clock, StaleRecordError
        for one that is not newer, SwarmError for a forged one.
        """
        entry = self._current(record.server, now)
        if entry is None or entry.record.run != record.run:
            raise UnprovenRecordError(f"the record of {record.name} was not heard at its address yet")
        if record.issued <= entry.record.issued:
            raise StaleRecordError(f"the record of {record.name} is older than the one that is known")
        if record.expires - entry.ahead_s <= now:
            raise UnprovenRecordError(f"the record of {record.name} expired on its way here")
        record.check()
        self._believe(record, entry.ahead_s, now)

    def check(self, record: Record, now: float) -> None:
        """Raise SwarmError for a record that is forged or lives too long; StaleRecordError for one that is older
        than what is known of the same run of its server; TwinError for one whose key is in use at another address
        since an earlier time. The signature, which takes longest, is looked at last."""
        record.check_life()
        entry = self._current(record.server, now)
        latest = entry.record if entry is not None else None
        if latest is not None and latest.run == record.run and record.issued <= latest.issued:
            raise StaleRecordError(f"the record of {record.name} is older than the one that is known: it is replayed")
        record.check()
        if latest is None or latest.address == record.address:
            return
        if latest.counted() and latest.started < record.started:
            raise TwinError(
                f"the key of {record.name} is in use at {latest.address}: give each server a key of its own, or wait "
                f"{entry.until - now:.0f} s for the record of an earlier life to expire"
            )

    def accept_all(self, records: Iterable[Record], now: float) -> dict[str, SwarmError]:
        """Believe those of ``records``, which somebody passes on, that renew what is known.

        What is wrong with the others, by subkey: UnprovenRecordError for servers that have not said it here themselves,
        whose signatures are not looked at. After ``_MOST_FORGED`` forged ones no more are.
        """
        wrong: dict[str, SwarmError] = {}
        forged = 0
        for record in records:
            entry = self._entries.get(record.server)
            if entry is not None and entry.record == record:
                continue
            try:
                if forged >= _MOST_FORGED:
                    raise UnprovenRecordError(f"the record of {record.name} came behind {forged} forged ones")
                self.renew(record, now)
            except SwarmError as error:
                forged += not isinstance(error, UnprovenRecordError | StaleRecordError)
                wrong[record.server] = error
        return wrong

    def knows(self, record: Record, now: float) -> bool:
        """Return whether this server has proven this address, and its record there has not expired."""
        entry = self._current(record.server, now)
        return entry is not None and entry.record.address == record.address

    def at(self, address: str, now: float) -> Record | None:
        """Return the record of the server that has proven ``address``; None where there is none, or it has expired."""
        entry = self._current(self._spots.get(spot_of(address), ""), now)
        return entry.record if entry is not None else None

    def met(self, server: str, now: float) -> bool:
        """Return whether the server of this subkey was believed here within the longest life of a record."""
        return self._met.get(server, -LONGEST_S) > now - LONGEST_S

    def live(self, now: float) -> list[Record]:
        """The records that have not expired, those of servers that leave included."""
        return [entry.record for entry in list(self._entries.values()) if entry.until > now]  # any thread may ask

    def serving(self, model: str, now: float) -> list[Record]:
        """Return the records of the servers that serve blocks of ``model`` (sha256) now."""
        return [record for record in self.live(now) if record.model == model and record.span]

    def _current(self, server: str, now: float) -> _Believed | None:
        entry = self._entries.get(server)
        return entry if entry is not None and entry.until > now else None

    def _believe(self, record: Record, ahead_s: float, now: float) -> None:
        self._drop(record.server)
        spot = spot_of(record.address)
        if (before := self._spots.get(spot)) is not None:
            self._drop(before)
        if len(self._entries) >= MOST:
            ((largest, _),) = Counter(entry.network for entry in self._entries.values()).most_common(1)
            self._drop(next(server for server, entry in self._entries.items() if entry.network == largest))
        until = min(now, record.issued - ahead_s) + record.life_s
        self._entries[record.server] = _Believed(record, network_of(record.address), ahead_s, until)
        self._spots[spot] = record.server
        remember(self._met, record.server, now, _MOST_MET)

    def _drop(self, server: str) -> None:
        if (entry := self._entries.pop(server, None)) is not None:
            del self._spots[spot_of(entry.record.address)]

    def _forget(self, now: float) -> None:
        for server in [server for server, entry in self._entries.items() if entry.until <= now]:
            self._drop(server)
        self._met = {server: when for server, when in self._met.items() if when > now - LONGEST_S}
