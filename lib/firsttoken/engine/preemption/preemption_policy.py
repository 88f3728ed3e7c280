"""What a preemption policy is: it says how a victim's keys and values come back, and is told what recoveries cost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from firsttoken.study.errors import RequestError

if TYPE_CHECKING:
    from firsttoken.engine.executor import Executor


class Action(StrEnum):
    """How a preempted request comes back: its keys and values wait on the host, or are computed again."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Observation:
    """A cost that the engine has seen.

    SWAP is one recovery: out, prep and in. RECOMPUTE is a prefill of ``tokens`` tokens from nothing, a first one as
    well as a repeated one: both cost the same, so ordinary prefills teach the price of recomputing for nothing. Raises
    RequestError for less than one token, or seconds that are negative or not finite.
    """

    action: Action
    tokens: int
    seconds: float
    now_s: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.seconds < math.inf:
            raise RequestError(f"observation: {self.tokens} tokens in {self.seconds} s; give 1 or more and 0 s or more")


class PreemptionPolicy(ABC):
    """Chooses for one victim at a time."""

    name: ClassVar[str]

    @abstractmethod
    def choose(self, tokens: int, now_s: float) -> Action:
        """How a victim that holds the keys and values of ``tokens`` tokens shall come back."""

    def prepare(self, executor: Executor, dtype: str) -> str:
        """Get ready, in seconds if need be, before the first request of a service runs; the default needs nothing.

        ``executor`` will run the requests, in ``dtype``, and runs none yet. Return what the user is told, or "".
        """
        return ""

    def observe(self, seen: Observation) -> None:  # noqa: B027 - a static policy learns nothing
        """Learn from a cost; the default learns nothing."""
