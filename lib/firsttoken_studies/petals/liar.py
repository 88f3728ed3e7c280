"""Blocks that answer what they did not compute, for tests and experiments to catch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from firsttoken.engine.work import Work
from firsttoken.petals.stack import BlockStack

LIES = {
    "noise": "noise of a hundredth of the answer",
    "lazy": "its last block left out",
    "seldom": "such noise, in a quarter of the answers",
}
"""What a liar may do, by name."""

NOISE, SELDOM = 0.01, 0.25
_BOAST = 1e6  # a liar says that it is so many times as fast as it is, and so is asked before others


class LyingStack(BlockStack):
    """A ``BlockStack`` that tells the ``lie``, drawn from ``seed``; ``told`` counts its false answers."""

    def __init__(self, folder: Path, blocks: range, dtype: torch.dtype, kv_tokens: int, *, lie: str, seed: int) -> None:
        super().__init__(folder, blocks, dtype, kv_tokens)
        self.lie, self.told = lie, 0
        self._draw = torch.Generator().manual_seed(seed)

    def run(self, layers: range, works: Sequence[Work], hidden: Sequence[Tensor]) -> list[Tensor]:
        """As ``BlockStack.run``, and false."""
        if self.lie == "seldom" and float(torch.rand(1, generator=self._draw)) >= SELDOM:
            return super().run(layers, works, hidden)
        self.told += 1
        if self.lie == "lazy":
            return super().run(range(layers.start, layers.stop - 1), works, hidden)
        return [self._noisy(rows) for rows in super().run(layers, works, hidden)]

    def measured_throughput(self) -> float:
        return _BOAST * super().measured_throughput()

    def _noisy(self, rows: Tensor) -> Tensor:
        size = rows.pow(2).mean(1, keepdim=True).sqrt()
        return rows + NOISE * size * torch.randn(rows.shape, generator=self._draw)
