"""Numbered blocks: who has which is kept here, and nowhere else (after PagedAttention, Kwon et al., SOSP 2023)."""

from __future__ import annotations

from collections.abc import Iterable

from firsttoken.study.errors import RequestError


class BlockPool:
    """``count`` numbered blocks, each either free or taken.

    ``watermark`` blocks are held back from those who ask for less than they may need later (admission): vLLM keeps 1 %
    to preempt less often, CPS switches it off (3.1).
    """

    def __init__(self, count: int, watermark: int = 0) -> None:
        if count < 1 or not 0 <= watermark < count:
            raise RequestError(f"block pool: {count} blocks with {watermark} held back; keep at least one to give out")
        self.count = count
        self.watermark = watermark
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def take(self, wanted: int, *, admission: bool = False) -> list[int] | None:
        """``wanted`` blocks, or None when there are not as many; for an ``admission`` the watermark stays free."""
        if wanted > self.free - (self.watermark if admission else 0):
            return None
        taken = [self._free.pop() for _ in range(wanted)]
        self._taken.update(taken)
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises RequestError for one that was not taken: two owners would share its keys."""
        for block in reversed(list(blocks)):
            if block not in self._taken:
                raise RequestError(f"block pool: block {block} was given back, but nobody has it")
            self._taken.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Assert that every block is free or taken, and none is both or twice."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._taken, "a block is free and taken"
        assert free | self._taken == set(range(self.count)), "a block is lost"
