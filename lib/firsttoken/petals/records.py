"""What a server says of itself, signed with its key: nobody else can say it, and it is forgotten in time."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from firsttoken.assets.model_config import MOST_LAYERS
from firsttoken.petals.addresses import fault_of
from firsttoken.petals.keys import ServerKey, check_signature, signature_of
from firsttoken.petals.routing import Reachable
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.parse_errors import Damaged, shown
from firsttoken.study.parsing.schema import at_least, between, digits, shaped

LONGEST_S = 300.0  # that a record may live
SKEW_S = 5.0  # that two clocks may differ by
_DOMAIN = b"firsttoken swarm record 2\n"
_Block = Annotated[int, between(0, MOST_LAYERS)]
MOST_ADAPTERS = 16  # of a server: a record is one message
_ADAPTER = re.compile(r"[\w.-]{1,64}@[0-9a-f]{64}", re.ASCII)


def adapter_name(name: str, sha256: str) -> str:
    """What servers and clients call the adapter of these files under this name: both have to be the same."""
    return f"{name}@{sha256}"


def adapters_fault(value: tuple[str, ...]) -> str:
    """What is wrong with the names of a server's adapters; nothing where they can be announced."""
    fits = len(value) <= MOST_ADAPTERS and all(map(_ADAPTER.fullmatch, value))
    return "" if fits else f"expected at most {MOST_ADAPTERS} adapters as NAME@SHA256"


class TwinError(SwarmError):
    """Two servers announce under one key."""


@dataclass(frozen=True)
class Record:
    """A server's announcement: under its subkey ``server`` (its Ed25519 public key, hex) nobody else can write.

    It holds ``blocks`` [start, stop) of ``model`` (sha256), computes ``throughput`` tokens a second through one block,
    and runs since ``started``. Of two records the later ``issued`` counts, until it ``expires``; all are seconds of the
    wall clock. One that ``moves`` may take other blocks: since ``wishes`` it means to hold ``target``, and with
    no ``blocks`` it loads them. Equal ends of both: the server leaves. It also computes its blocks with each of the
    ``adapters`` (``adapter_name``).
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
    def turn(self) -> tuple[float, str]:
        """The place among servers that mean to move: of two the lower one goes, and the other asks itself again."""
        return self.wishes, self.server

    def counted(self, turn: tuple[float, str] | None = None) -> range:
        """The blocks with which who means to move counts it: those that it means to hold, unless its turn comes behind
        ``turn``. None of one that leaves."""
        later = turn is not None and self.span and self.turn > turn
        return self.span if later or not range(*self.target) else range(*self.target)

    @property
    def name(self) -> str:
        """What messages call the server: the first digits of its key, and where it is."""
        return f"{self.server[:8]} at {self.address}"

    def signed(self, key: ServerKey) -> Record:
        """This with the signature of its server's ``key``."""
        return replace(self, signature=signature_of(key, _DOMAIN, self.as_dict()))

    def check(self, now: float) -> None:
        """Raise SwarmError unless its server signed it, and it is of ``now``: see ``check_time``."""
        self.check_time(now)
        check_signature(self.server, _DOMAIN, self.as_dict(), f"the record of {self.name}")

    def check_time(self, now: float) -> None:
        """Raise SwarmError where it has expired, is of the future, or lives longer than records do.

        This is what costs nothing: it is asked before the signature is.
        """
        if (
            self.blocks[0] > self.blocks[1]
            or self.target[0] > self.target[1]
            or not 0 < self.expires - self.issued <= LONGEST_S
        ):
            raise SwarmError(f"the record of {self.name} has no blocks, or a life of more than {LONGEST_S:.0f} s")
        if self.expires <= now:
            raise SwarmError(
                f"the record of {self.name} expired {now - self.expires:.1f} s ago: set the clocks if it still runs"
            )
        if self.issued > now + SKEW_S:
            raise SwarmError(f"the record of {self.name} is of a time {self.issued - now:.1f} s ahead: set the clocks")

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
        return shaped(Record, value)
    except Damaged as error:
        raise SwarmError(f"{shown(value)} is no record of a server: {error}") from error
