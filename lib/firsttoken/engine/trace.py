"""What an observer of the engine keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from firsttoken.engine.preemptor import Recovery
from firsttoken.engine.work import Booking, Kind, Work


@dataclass(frozen=True)
class Step:
    """One step as it was: ``prefills`` are (cached, new) tokens, ``contexts`` the cached tokens of each decode.

    These are shapes, which costs hang on; ``works`` are what they are the shapes of.
    """

    at_s: float
    seconds: float
    prefills: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    works: tuple[Work, ...]

    @property
    def bookings(self) -> tuple[Booking, ...]:
        """What was done for which tokens of whom."""
        return tuple(booking for work in self.works for booking in work.bookings)

    @property
    def tokens(self) -> dict[Kind, int]:
        """How many of each kind."""
        tokens = dict.fromkeys(Kind, 0)
        for line in self.bookings:
            tokens[line.kind] += line.end - line.start
        return tokens


@dataclass
class Trace:
    """Every step and every recovery, in their order."""

    steps: list[Step] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
