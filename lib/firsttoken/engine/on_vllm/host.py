"""Host memory for swapped requests: who has which blocks of it, and the copies between it and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firsttoken.study.errors import RequestError


class HostRanges:
    """``count`` numbered host blocks, given out in contiguous ranges, so that a request moves with one copy a layer.

    First fit over the gaps, which are kept sorted and apart.
    """

    def __init__(self, count: int) -> None:
        self._gaps = [range(count)]

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return sum(map(len, self._gaps))

    def take(self, wanted: int) -> range | None:
        """``wanted`` blocks, or None when there is no gap as large."""
        for at, gap in enumerate(self._gaps):
            if len(gap) >= wanted:
                self._gaps[at : at + 1] = [gap[wanted:]] if len(gap) > wanted else []
                return gap[:wanted]
        return None

    def give(self, blocks: range) -> None:
        """Give a range back. Raises RequestError when a block of it is free already: two requests would share it."""
        near = [gap for gap in self._gaps if gap.start <= blocks.stop and blocks.start <= gap.stop]
        if any(gap.start < blocks.stop and blocks.start < gap.stop for gap in near):
            raise RequestError(f"host pool: {blocks} was given back, but nobody has it")
        apart = [gap for gap in self._gaps if gap not in near]
        near.append(blocks)
        joined = range(min(gap.start for gap in near), max(gap.stop for gap in near))
        self._gaps = sorted([*apart, joined], key=lambda gap: gap.start)


class HostPool:
    """Host copies of KV blocks, ``rows`` [layers, host blocks, one block of one layer].

    ``caches`` are the layers' KV caches [blocks, ...]. The memory is written once when it is made, so that no request
    pays for its first touch. On CUDA every copy goes to the current stream: a copy out reads a block before the next
    forward pass overwrites it, and a copy in has written it before the next one reads it, without waiting here.
    """

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int, pin_memory: bool) -> None:
        self._caches = list(caches)
        shape = (len(self._caches), blocks, *self._caches[0].shape[1:])
        self.rows = torch.empty(shape, dtype=self._caches[0].dtype, pin_memory=pin_memory).zero_()

    def copy_out(self, blocks: Sequence[int], held: range) -> None:
        """KV blocks ``blocks`` to the host blocks ``held``."""
        for cache, rows, chosen in self._layers(blocks, held):
            if cache.is_cpu:
                torch.index_select(cache, 0, chosen, out=rows)
            else:
                rows.copy_(cache.index_select(0, chosen), non_blocking=True)

    def copy_in(self, held: range, blocks: Sequence[int]) -> None:
        """The host blocks ``held`` to the KV blocks ``blocks``."""
        for cache, rows, chosen in self._layers(blocks, held):
            cache.index_copy_(0, chosen, rows.to(cache.device, non_blocking=True))

    def _layers(self, blocks: Sequence[int], held: range):
        chosen = torch.tensor(blocks, device=self._caches[0].device)
        for cache, rows in zip(self._caches, self.rows, strict=True):
            yield cache, rows[held.start : held.stop], chosen
