"""The upper tier: pieces of KV cache in memory. An entry goes as a whole; it may be there in part, layer by layer.

Not safe for threads: the store that owns it holds its lock.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from firsttoken.droidspeak.recency import Recency
from firsttoken.study.errors import CacheError


class MemoryTier:
    """At most ``limit`` bytes of tensors, by entry and name of the piece."""

    def __init__(self, limit: int) -> None:
        self._recency = Recency(limit)
        self._pieces: dict[str, dict[str, Tensor]] = {}

    @property
    def used(self) -> int:
        """Bytes of all tensors."""
        return self._recency.used

    def check(self, length: int, pieces: Mapping[str, Tensor]) -> None:
        """Raise CacheError when the ``pieces`` of a prefix of ``length`` tokens are larger than the tier."""
        size = sum(piece.nbytes for piece in pieces.values())
        if size > self._recency.limit:
            raise CacheError(
                f"the KV cache of {length} tokens takes {size:,} bytes, all of the store has {self._recency.limit:,}; "
                "raise memory_bytes"
            )

    def add(self, key: str, pieces: Mapping[str, Tensor]) -> list[str]:
        """Keep ``pieces`` with those of ``key`` that are there, unless all of them together are larger than the tier.

        Returns the entries that made room for them.
        """
        held = self._pieces.get(key, {}) | dict(pieces)
        size = sum(piece.nbytes for piece in held.values())
        if size > self._recency.limit:
            return []
        gone = self._recency.put(key, size)
        for other in gone:
            del self._pieces[other]
        self._pieces[key] = held
        return gone

    def pieces(self, key: str) -> Mapping[str, Tensor]:
        """What is held of ``key``, which counts as a use; it stays as it is when the entry goes."""
        self._recency.touch(key)
        return self._pieces.get(key, {})

    def drop(self, key: str) -> None:
        """Forget ``key``."""
        self._recency.drop(key)
        self._pieces.pop(key, None)
