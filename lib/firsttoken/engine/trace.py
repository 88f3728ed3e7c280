"""What an observer of the engine keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from firsttoken.engine.preemptor import Recovery
from firsttoken.engine.work import Booking


@dataclass(frozen=True)
class Step:
    """One step as it was: ``prefills`` are (cached, new) tokens, ``contexts`` the cached tokens of each decode.

    These are shapes, which costs hang on; ``bookings`` say what was done for which tokens of whom.
    """

    at_s: float
    seconds: float
    prefills: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    bookings: tuple[Booking, ...]


@dataclass
class Trace:
    """Every step and every recovery, in their order."""

    steps: list[Step] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
