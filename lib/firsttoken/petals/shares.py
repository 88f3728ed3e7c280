"""What a stranger may ask of a member: so much at once, and more with time, for each place that it asks from."""

from __future__ import annotations

import time

from firsttoken.study.errors import BusyError

_MOST = 4096  # sources that are known; who was heard of longest ago is forgotten first


class Shares:
    """Each source has ``most`` shares at first, and one more every ``every_s`` seconds until it has as many again."""

    def __init__(self, most: int, every_s: float) -> None:
        self.most, self.every_s = most, every_s
        self._left: dict[str, tuple[float, float]] = {}  # by source: shares, and when

    def left(self, source: str) -> bool:
        """Whether ``source`` has a share left."""
        return self._now(source) >= 1

    def take(self, source: str) -> None:
        """Take one of the shares of ``source``. Raises BusyError where it has none."""
        left = self._now(source)
        if left < 1:
            raise BusyError(
                f"too much was asked from {source.rpartition(':')[0] or source}: ask again in "
                f"{(1 - left) * self.every_s:.0f} s"
            )
        self._set(source, left - 1)

    def give_back(self, source: str) -> None:
        """Give the share of ``source`` back, as it was well spent."""
        self._set(source, min(self._now(source) + 1, self.most))

    def _now(self, source: str) -> float:
        left, at = self._left.get(source, (float(self.most), 0.0))
        return min(left + (time.monotonic() - at) / self.every_s, self.most)

    def _set(self, source: str, left: float) -> None:
        self._left.pop(source, None)
        self._left[source] = left, time.monotonic()
        if len(self._left) > _MOST:
            del self._left[next(iter(self._left))]
