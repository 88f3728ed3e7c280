"""What a server gives to all of its clients together, and for how long; the share of each is fair (``fairness``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firsttoken.study.errors import SwarmError


@dataclass(frozen=True)
class ServerLimits:
    """``sessions`` are open at most, and so many more ``waiting`` for a place; ``sequences`` in all of them, with keys
    and values of ``kv_tokens`` tokens; a batch has ``batch_tokens``. A session of which nothing is computed, or
    whose answer is not read, for ``idle_s`` seconds is ended. One, or a sequence, of which nothing was computed for
    ``spare_s`` seconds is given up where another lacks room. A record is renewed three times in the ``expiry_s``
    seconds that it lives. One that may move looks every ``rebalance_s`` whether it should; sessions have ``drain_s`` to
    end then. Raises SwarmError for what is below 1 (0 for ``waiting``), or no time."""

    sessions: int = 64
    waiting: int = 0
    sequences: int = 256
    kv_tokens: int = 16384
    batch_tokens: int = 1024
    idle_s: float = 60.0
    spare_s: float = 5.0
    expiry_s: float = 30.0
    rebalance_s: float = 120.0
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("sessions", "sequences", "kv_tokens", "batch_tokens"):
            if getattr(self, name) < 1:
                raise SwarmError(f"a server's {name} must be at least 1, not {getattr(self, name)}")
        if self.waiting < 0:
            raise SwarmError(f"a server's waiting must be 0 sessions or more, not {self.waiting}")
        for name in ("idle_s", "spare_s", "expiry_s", "rebalance_s", "drain_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise SwarmError(f"a server's {name} must be seconds above 0, not {getattr(self, name)}")
