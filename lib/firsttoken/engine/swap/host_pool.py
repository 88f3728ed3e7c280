"""Host memory for the KV blocks of preempted requests: taken from the system once, given out in consecutive rows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import torch

from firsttoken.engine.kv import KVShape
from firsttoken.study.errors import RequestError


@dataclass(frozen=True, order=True)
class Span:
    """``blocks`` consecutive block rows of a host pool, from row ``start``."""

    start: int
    blocks: int

    @property
    def end(self) -> int:
        return self.start + self.blocks


class HostAllocator:
    """``blocks`` rows, given out as spans by first fit, and merged when they come back."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._holes = [Span(0, blocks)]  # in order; no two touch
        self._taken: set[Span] = set()

    @property
    def free(self) -> int:
        """Return the number of rows that nobody has."""
        return sum(hole.blocks for hole in self._holes)

    @property
    def largest(self) -> int:
        """Rows of the largest span that can be taken now."""
        return max((hole.blocks for hole in self._holes), default=0)

    def allocate(self, blocks: int) -> Span | None:
        """The first span of ``blocks`` rows that is free, or None. Raises RequestError for less than one."""
        if blocks < 1:
            raise RequestError(f"host pool: a span has at least 1 block, not {blocks}")
        for index, hole in enumerate(self._holes):
            if hole.blocks >= blocks:
                rest = Span(hole.start + blocks, hole.blocks - blocks)
                self._holes[index : index + 1] = [rest] if rest.blocks else []
                span = Span(hole.start, blocks)
                self._taken.add(span)
                return span
        return None

    def release(self, span: Span) -> None:
        """Give ``span`` back, once nothing moves from or to it. Raises RequestError for one that nobody has."""
        if span not in self._taken:
            raise RequestError(_not_taken(span))
        self._taken.remove(span)
        low = high = bisect_left(self._holes, span)
        start, end = span.start, span.end
        if low > 0 and self._holes[low - 1].end == start:
            low -= 1
            start = self._holes[low].start
        if high < len(self._holes) and self._holes[high].start == end:
            end = self._holes[high].end
            high += 1
        self._holes[low:high] = [Span(start, end - start)]

    def require(self, span: Span) -> None:
        """Raise RequestError unless somebody has ``span``, or one that it is part of."""
        if not any(taken.start <= span.start and span.end <= taken.end for taken in self._taken):
            raise RequestError(_not_taken(span))

    def check(self) -> None:
        """Assert that every row is in one span, and that no two holes touch."""
        spans = sorted([*self._holes, *self._taken])
        assert all(span.blocks > 0 for span in spans), "an empty span"
        span_ends = [0, *(span.end for span in spans)]
        assert [span.start for span in spans] == span_ends[:-1], "a row is lost, or in two spans"
        assert span_ends[-1] == self.blocks, "a row is lost at the end"
        assert all(hole.end < next_hole.start for hole, next_hole in pairwise(self._holes)), "two holes touch"


def _not_taken(span: Span) -> str:
    return f"host pool: rows {span.start} to {span.end} are not taken; take a span, give it once"


class HostPool(HostAllocator):
    """A host pool of ``blocks`` block rows, given out as spans of consecutive rows.

    A request's rows lie together, so that one copy can move them all. All memory is allocated here and written once:
    no swap pays for its first touch, nor for pinning it.

    Raises RequestError for less than one block, or for memory that the machine does not have or cannot pin.
    """

    def __init__(self, shape: KVShape, blocks: int, pinned: bool) -> None:
        if blocks < 1:
            raise RequestError(f"host pool: it needs room for at least 1 block of {shape.block_bytes:,} bytes")
        super().__init__(blocks)
        size = (blocks, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
        try:
            self.all_rows = torch.empty(size, dtype=shape.dtype, pin_memory=pinned).zero_()
        except RuntimeError as error:
            kind = "pinned memory, which needs a CUDA device" if pinned else "memory"
            gib = blocks * shape.block_bytes / 2**30
            raise RequestError(f"host pool: {gib:.2f} GiB of {kind} are not free; ask for fewer blocks") from error
        self.shape = shape

    def rows(self, span: Span) -> torch.Tensor:
        """The rows of ``span`` [span.blocks, layers, 2, block_tokens, kv_heads, head_dim], a view.

        Raises RequestError for a span that nobody has.
        """
        self.require(span)
        return self.all_rows[span.start : span.end]
