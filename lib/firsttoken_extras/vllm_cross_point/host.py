"""Host memory for swapped requests, and the copies between it and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firsttoken.engine.swap.host_pool import Span


class KVBlocksOnHost:
    """Host copies of KV blocks, ``rows`` [layers, host blocks, one block of one layer].

    ``caches`` are the layers' KV caches [blocks, ...]. The memory is written once when it is made, so that no request
    pays for its first touch. On CUDA every copy goes to the current stream: a copy out reads a block before the next
    forward pass overwrites it, and a copy in has written it before the next one reads it, without waiting here.
    """

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int, pin_memory: bool) -> None:
        self._caches = list(caches)
        shape = (len(self._caches), blocks, *self._caches[0].shape[1:])
        self.rows = torch.empty(shape, dtype=self._caches[0].dtype, pin_memory=pin_memory).zero_()

    def copy_out(self, blocks: Sequence[int], held: Span) -> None:
        """Copy the KV blocks ``blocks`` to the host blocks ``held``."""
        for cache, rows, chosen in self._layers(blocks, held):
            if cache.is_cpu:
                torch.index_select(cache, 0, chosen, out=rows)
            else:
                rows.copy_(cache.index_select(0, chosen), non_blocking=True)

    def copy_in(self, held: Span, blocks: Sequence[int]) -> None:
        """Copy the host blocks ``held`` to the KV blocks ``blocks``."""
        for cache, rows, chosen in self._layers(blocks, held):
            cache.index_copy_(0, chosen, rows.to(cache.device, non_blocking=True))

    def _layers(self, blocks: Sequence[int], held: Span):
        chosen = torch.tensor(blocks, device=self._caches[0].device)
        for cache, rows in zip(self._caches, self.rows, strict=True):
            yield cache, rows[held.start : held.end], chosen
