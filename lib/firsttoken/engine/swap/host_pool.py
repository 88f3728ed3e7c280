"""Host memory for the KV blocks of preempted requests, taken from the system once."""

from __future__ import annotations

import torch

from firsttoken.engine.kv import KVShape
from firsttoken.engine.swap.host_allocator import HostAllocator, Span
from firsttoken.study.errors import RequestError


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
