"""Least recently used goes first, by bytes."""

from __future__ import annotations

from collections import OrderedDict


class Recency:
    """Keys with their bytes in the order of their last use; together they never hold more than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._bytes: OrderedDict[str, int] = OrderedDict()

    def put(self, key: str, size: int) -> list[str]:
        """Give ``key`` room for ``size`` bytes, at most ``limit``; returns the keys that had to make room."""
        assert size <= self.limit, "what can never fit is refused before"
        self.drop(key)
        gone = []
        while self.used + size > self.limit:
            oldest, freed = self._bytes.popitem(last=False)
            self.used -= freed
            gone.append(oldest)
        self._bytes[key] = size
        self.used += size
        return gone

    def touch(self, key: str) -> None:
        """``key``, where it is held, was used just now."""
        if key in self._bytes:
            self._bytes.move_to_end(key)

    def drop(self, key: str) -> None:
        """Take ``key`` out, where it is held."""
        self.used -= self._bytes.pop(key, 0)
