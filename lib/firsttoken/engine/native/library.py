"""Builds ``kernels.cpp`` once with the machine's C++ compiler, and calls it with tensors.

Without a compiler, or where it fails, ``kernels`` is None and torch's own operations do the work. Where it is built and
its products are wrong, oneDNN multiplies.
"""

from __future__ import annotations

import functools
import warnings

import numpy as np
import torch
from torch import Tensor

from firsttoken.engine.native.exports import Exports, load_exports

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The compiled functions. Tensors lie on the CPU, in one of ``NAMES``' dtypes; they are contiguous but ``query``
    and ``states`` of ``rotate``, whose tokens may be further apart."""

    def __init__(self, exports: Exports) -> None:
        self._exports = exports
        self.panel = exports.panel
        bf16 = exports.has_bfloat16 and not torch.cpu._is_amx_tile_supported()
        self.multiplied = frozenset(
            dtype for dtype in [torch.float32, torch.bfloat16][: 1 + bf16] if _multiplies(exports, NAMES[dtype])
        )

    def attend(
        self, query: Tensor, pool: Tensor, layer: int, tables: Tensor, works: Tensor, contexts: Tensor, scale: float
    ) -> Tensor:
        """Attention of ``query`` [tokens, heads, head_dim] over ``pool`` (``KVPool.rows``) -> the shape of ``query``.

        ``tables`` [works, blocks] are block tables; ``works`` and ``contexts`` [tokens] say whose table a token reads,
        and how many tokens it sees; all three are int64.
        """
        tokens, heads, width = query.shape
        _, _, _, block_tokens, kv_heads, _ = pool.shape
        out = query.new_empty(tokens, heads, width)
        seen = (pool, tables, tables.shape[1], works, contexts)
        sizes = (tokens, kv_heads, heads // kv_heads, width, block_tokens, pool.stride(0))
        self._call("attend", query.dtype, query, query.stride(0), *seen, out, *sizes, layer, scale)
        return out

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """``states`` [..., width] over their root mean square, times ``weight`` [width]."""
        out, width = torch.empty_like(states), states.shape[-1]
        self._call("rms_norm", states.dtype, states, weight, out, states.numel() // width, width, epsilon)
        return out

    def gated(self, states: Tensor) -> Tensor:
        """silu of the first half of ``states`` [..., 2 * width], times the second half -> [..., width]."""
        width = states.shape[-1] // 2
        out = states.new_empty(*states.shape[:-1], width)
        self._call("gated", states.dtype, states, out, out.numel() // width, width)
        return out

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``states`` [tokens, heads, head_dim] in place by ``cos`` and ``sin`` [tokens, head_dim]."""
        self._call("rotate", states.dtype, states, states.stride(0), cos, sin, *states.shape)

    def pack(self, rows: Tensor, weight: np.ndarray) -> None:
        """Write ``rows`` [outputs, inputs] where ``weight``, the fields of a ``Weight``, says that its panels are."""
        self._call("pack", rows.dtype, rows, weight)

    def pack_adapter(self, b: Tensor, offsets: Tensor, weight: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``b`` [outputs, rank] in fp32 and ``offsets`` int64 [outputs] as the kernels read them beside ``weight``.

        That is of ``dtype``. Both are empty where two adapters share half of a panel."""
        outputs, rank = b.shape
        halves = 2 * (outputs // self.panel + 2)  # as many as a gated weight can have, too
        packed = torch.zeros(halves * rank * self.panel // 2)
        places = torch.zeros(halves, dtype=torch.int64)
        fits = self._exports.call("pack_adapter", NAMES[dtype], b, offsets, rank, weight, packed, places)
        return (packed, places) if fits else (packed[:0], places[:0])

    def product(self, rows: Tensor, weight: np.ndarray, other: Tensor | None, out: Tensor) -> Tensor:
        """``rows`` [..., inputs] times ``weight``; ``other``, of the shape of ``out`` [..., width], is added if given.

        Returns ``out``."""
        self._call("product", rows.dtype, rows, rows.numel() // rows.shape[-1], weight, other, out)
        return out

    def run_layers(
        self,
        layers: np.ndarray,
        variant_of: Tensor | None,
        states: Tensor,
        turns: tuple[Tensor, Tensor],
        pool: Tensor,
        tables: Tensor,
        works: Tensor,
        contexts: Tensor,
        room: int,
        epsilon: float,
        scale: float,
    ) -> None:
        """Decoder layers over ``states`` [tokens, hidden], in place; their keys and values go into ``pool``.

        ``layers`` [variants, layers, fields] are the fields of a ``Layer`` each, of variants that differ in adapters
        alone; ``variant_of`` int64 [tokens] says whose a token is, None that there is one. ``turns`` are the positions'
        cosines and sines [tokens, head_dim], ``room`` the numbers a token has on the way; the others are those of
        ``attend``.
        """
        tokens, between = len(states), states.new_empty(len(states) * room)
        _, _, _, block_tokens, kv_heads, width = pool.shape
        run = (layers, len(layers), variant_of, layers.shape[1])
        seen = (pool, tables, tables.shape[1], works, contexts)
        sizes = (tokens, kv_heads, width, block_tokens, pool.stride(0))
        self._call("run_layers", states.dtype, *run, states, *turns, *seen, *sizes, between, epsilon, scale)

    def _call(self, name: str, dtype: torch.dtype, *arguments: Tensor | np.ndarray | float | None) -> None:
        """Call the function ``name`` for ``dtype`` with as many threads as torch has."""
        self._exports.call(name, NAMES[dtype], *arguments, torch.get_num_threads())


def _multiplies(exports: Exports, dtype: str) -> bool:
    """Whether the products in ``dtype`` are right; says so where they are not."""
    if exports.multiplies(dtype):
        return True
    warnings.warn(f"the engine's own {dtype} products are wrong on this processor; oneDNN multiplies", stacklevel=2)
    return False


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, built at the first call (seconds) and kept in the cache folder; None, with a warning, without."""
    try:
        return Kernels(load_exports())
    except (OSError, AttributeError) as error:
        warnings.warn(f"the engine runs without its own CPU kernels, slower: {error}", stacklevel=2)
        return None
