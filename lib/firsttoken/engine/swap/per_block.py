"""One copy for each block, layer, and keys or values: the swap of vLLM 0.2.4, which CPS measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias

import torch

from firsttoken.engine.kv import KVPool
from firsttoken.engine.swap.block_copier import Move, SwapPath
from firsttoken.engine.swap.host_pool import HostPool, Span

Pieces = Sequence[torch.Tensor]
Cut: TypeAlias = Callable[[torch.Tensor], Pieces]
"""What cuts a block [layers, 2, block_tokens, kv_heads, head_dim] into the pieces, views, that a copy each moves."""


class PerBlock(SwapPath):
    """``KVShape.copies`` copies of ``KVShape.copy_bytes`` each, issued one after another by one loop in C++.

    vLLM 0.2.4 has that loop in ``swap_blocks`` (csrc/cache_kernels.cu) and calls it for the keys, then the values, of
    each layer, as each layer has a tensor of its own. Here a block is one row, so its layers follow each other; number
    and size of the copies are the same. A CPU has no link: its copies cost what a call and a small memcpy cost.

    vLLM computes addresses in its loop. Here a copy needs two tensors, views that take 1 us or more to make; all of
    them, 0.6 KB each, are made with the path, so that preparing a swap is as little work as it is there. Another
    ``cut`` of a block makes other copies.
    """

    name = "per_block"

    def __init__(self, pool: KVPool, host_pool: HostPool, cut: Cut | None = None) -> None:
        super().__init__(pool, host_pool)
        self._device_views, self._host_views = (
            [(cut or keys_and_values)(block) for block in rows.unbind(0)] for rows in (pool.rows, host_pool.all_rows)
        )

    def _plan_out(self, blocks: Sequence[int], span: Span) -> tuple[int, Move]:
        host_views, device_views = self._views(blocks, span)
        return len(device_views), lambda: _copy_each(device_views, host_views)

    def _plan_into(self, blocks: Sequence[int], span: Span) -> tuple[int, Move]:
        host_views, device_views = self._views(blocks, span)
        return len(host_views), lambda: _copy_each(host_views, device_views)

    def _views(self, blocks: Sequence[int], span: Span) -> tuple[Pieces, Pieces]:
        """The pieces of ``blocks`` in the pool, and those of ``span`` on the host, in one order."""
        device_views = chain.from_iterable(self._device_views[block] for block in blocks)
        return list(device_views), list(chain.from_iterable(self._host_views[span.start : span.end]))


def keys_and_values(block: torch.Tensor) -> Pieces:
    """Cut a block into 2 * layers pieces [block_tokens, kv_heads, head_dim]: keys, then values of each layer."""
    return block.flatten(0, 1).unbind(0)


def _copy_each(targets: Pieces, sources: Pieces) -> None:
    # Tensor.copy_ of each, looped in C++; between two devices it has no shorter way. In Python the loop took up to
    # 2.7 times as long
    torch._foreach_copy_(targets, sources, non_blocking=True)
