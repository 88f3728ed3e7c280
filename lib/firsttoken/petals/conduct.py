"""How servers have behaved towards a client: who failed is not asked for a while, and who is late is told from others.

Who fails again is left alone for twice as long. A client that has nobody else for a block asks it sooner, after a rest
that grows with every failure, so that a server that is well again is found while the client still waits.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from firsttoken.petals.patience import Patience

TIMES = 3  # "several times" slower than announced, and than others
_REST_S = 0.05  # after the first failure
_LONGEST = 10  # times ``ban_s``
_LOST = 3  # times within ``ban_s`` that a server may lose a session without fault
_STEPS, _LATE_STEPS = 8, 2  # of so many steps so many have to be late: one may be anybody's hiccup


@dataclass
class _Behaviour:
    failures: int = 0
    failed_s: float = 0.0  # when it did so last, on the monotonic clock
    back_s: float = 0.0  # when it answered again after a silence
    lost_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LOST))
    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))


class Conduct:
    """What a client of this ``patience`` remembers of each server, by subkey."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._known: dict[str, _Behaviour] = {}

    def failed(self, server: str) -> None:
        """It could not go on, refused what was asked, answered nonsense, or was much too late."""
        known, now = self._known.setdefault(server, _Behaviour()), time.monotonic()
        if now - known.failed_s > 2 * self._ban_s(known):
            known.failures = 0
        known.failures, known.failed_s = known.failures + 1, now
        known.late_s.clear()

    def back(self, server: str) -> None:
        """It was silent, and answers again: what it failed at before may be over."""
        if (known := self._known.get(server)) is not None:
            known.back_s = time.monotonic()

    def lost(self, server: str) -> bool:
        """It has lost a session, as an idle one is; whether it does so too often to be without fault."""
        known, now = self._known.setdefault(server, _Behaviour()), time.monotonic()
        often = len(known.lost_s) == _LOST and now - known.lost_s[0] < self._patience.ban_s
        known.lost_s.append(now)
        return often

    def took(self, server: str, seconds: float, announced_s: float) -> None:
        """A step took it ``seconds`` where its ping and throughput had announced ``announced_s``."""
        late_s = seconds - announced_s
        late = late_s > max(self._patience.late_s, (TIMES - 1) * announced_s)
        self._known.setdefault(server, _Behaviour()).late_s.append(late_s if late else 0.0)

    def late_s(self, server: str) -> float:
        """Seconds that a step takes it beyond what it announced, 0 for one that is not late again and again."""
        known = self._known.get(server)
        if known is None or sum(one > 0 for one in known.late_s) < _LATE_STEPS:
            return 0.0
        return sum(known.late_s) / len(known.late_s)

    def shunned(self) -> set[str]:
        """Who is not asked where another has its blocks. Any thread may ask."""
        return {server for server, one in list(self._known.items()) if self._within(one, self._ban_s(one))}

    def resting(self) -> set[str]:
        """Who is not asked at all."""
        return {server for server, one in list(self._known.items()) if self._within(one, self._rest_s(one))}

    def _within(self, one: _Behaviour, seconds: float) -> bool:
        return one.failed_s > one.back_s and time.monotonic() - one.failed_s < seconds

    def _ban_s(self, one: _Behaviour) -> float:
        return min(2 ** (one.failures - 1), _LONGEST) * self._patience.ban_s if one.failures else 0.0

    def _rest_s(self, one: _Behaviour) -> float:
        """At most a quarter of the time in which a server is looked for: some tries fit in it."""
        return min(_REST_S * 2 ** (one.failures - 1), self._patience.find_s / 4) if one.failures else 0.0
