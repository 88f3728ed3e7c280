"""How long a client waits for what."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firsttoken.study.errors import SwarmError


@dataclass(frozen=True)
class Timeouts:
    """A server that has not answered a step after ``step_s`` seconds and ``token_s`` for each of its tokens is
    replaced, and not asked for ``ban_s`` seconds while another has its blocks. The swarm is looked over every
    ``refresh_s``, where a server answers within ``answer_s`` or is passed by; where nobody serves a block, the client
    waits ``find_s`` for somebody who does. Who fails again is not asked for twice as long. A step is late beyond
    ``late_s`` more than its server announced, and three times as long; who is late again and again is left for one that
    is not. Raises SwarmError for what is no time."""

    step_s: float = 5.0
    token_s: float = 0.05
    ban_s: float = 30.0
    refresh_s: float = 5.0
    answer_s: float = 2.0
    find_s: float = 30.0
    late_s: float = 0.25

    def __post_init__(self) -> None:
        for name in ("step_s", "token_s", "ban_s", "refresh_s", "answer_s", "find_s", "late_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise SwarmError(f"a client's {name} must be seconds above 0, not {getattr(self, name)}")

    def limit_s(self, tokens: int) -> float:
        """Seconds that a server has for ``tokens`` at once."""
        return self.step_s + tokens * self.token_s
