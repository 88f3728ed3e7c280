"""Paged attention by the kernels, which read blocks where they lie."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from firsttoken.engine.kv import KVShape
from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.sdpa_attention import PaddedAttend
from firsttoken_cpu.native.exports import WIDTHS
from firsttoken_cpu.native.library import NAMES, NativeLinear, kernels


class NativeAttend(PaddedAttend):
    """Decodes and short prefills in one call of the kernels, which read the pool in place: nothing is gathered, nothing
    padded (CPU). A long prefill is done as the reference does it."""

    # one layer, 9 heads of 64, 2 cores: with AVX-512 in bf16 3.6 ms at 512 tokens against SDPA's 5.1, 13.6 against 13.2
    # at 1,024 and 55 against 43 at 2,048; with AVX2 in float32 5.4 against 6.2, 19 against 16 and 79 against 58
    together = 512
    has_windows = False

    def _plan(self, works: list[ScheduledChunk]) -> None:
        shape = self.pool.shape
        width = max(shape.blocks(work.end) for work in works)
        self.tables = torch.tensor([(work.request.blocks + [0] * width)[:width] for work in works])
        self.sequences = torch.tensor([number for number, work in enumerate(works) for _ in range(work.tokens)])
        self.contexts = torch.tensor([position + 1 for work in works for position in range(work.start, work.end)])

    def read_by_kernels(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        return (self.tables, self.sequences, self.contexts) if self.shared == tokens else None

    def _attend(self, layer: int, query: torch.Tensor, scaling: float, window: int | None = None) -> torch.Tensor:
        if query.stride()[1:] != (query.shape[2], 1):
            query = query.contiguous()
        return kernels().attend(query, self.pool.rows, layer, self.tables, self.sequences, self.contexts, scaling)


class TiledAttend(NativeAttend):
    """Calls the kernels for decodes and a few tokens only, for CPUs whose SDPA multiplies with tiles (AMX, bf16).

    The kernels do not use tiles: a longer prefill is faster by SDPA.
    """

    # as above, over a context of 4,096: 16 tokens 2.5 ms by the kernels and 1.0 by SDPA, 512 tokens 68 and 7.7; over
    # one of 512, 16 tokens 0.20 and 0.16
    together = 15


def supports(shape: KVShape, device: torch.device) -> bool:
    """Return whether the kernels can be built here, and read a pool of this shape."""
    supported = device.type == "cpu" and shape.dtype in NAMES and shape.head_dim in WIDTHS
    return supported and kernels() is not None


def by_kernels(head: nn.Module, panels: np.ndarray) -> tuple[NativeLinear, type[NativeAttend]]:
    """The ``head``, whose weight is packed in ``panels``, and the attention that compute as a model before torch does,
    also where others are faster here: who began with that one ends with the same numbers."""
    return NativeLinear([head], panels=panels), NativeAttend
