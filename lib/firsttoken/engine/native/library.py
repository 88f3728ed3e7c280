"""Builds ``kernels.cpp`` once with the machine's C++ compiler, and calls it with tensors.

Without a compiler, or where it fails, ``kernels`` is None and torch's own operations do the work.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

from firsttoken.study.system.compiled import shared_library

SOURCE = Path(__file__).with_name("kernels.cpp")
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
WIDTHS = (16, 32, 64, 128)  # of a head: what kernels.cpp is compiled for
_POINTER, _COUNT, _REAL, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "attend": [_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER]
    + [_COUNT] * 7
    + [_REAL, _THREADS],
    "rms_norm": [_POINTER] * 3 + [_COUNT] * 2 + [_REAL, _THREADS],
    "gated": [_POINTER] * 2 + [_COUNT] * 2 + [_THREADS],
    "rotate": [_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _THREADS],
}


class Kernels:
    """The compiled functions. Tensors lie on the CPU, in one of ``NAMES``' dtypes; they are contiguous but ``query``
    and ``states`` of ``rotate``, whose tokens may be further apart."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        self._calls = {}
        for name, arguments in _ARGUMENTS.items():
            for dtype, suffix in NAMES.items():
                call = getattr(library, f"{name}_{suffix}")
                call.argtypes, call.restype = arguments, None
                self._calls[name, dtype] = call

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
        self._calls["attend", query.dtype](
            query.data_ptr(),
            query.stride(0),
            pool.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            works.data_ptr(),
            contexts.data_ptr(),
            out.data_ptr(),
            tokens,
            kv_heads,
            heads // kv_heads,
            width,
            block_tokens,
            pool.stride(0),
            layer,
            scale,
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """``states`` [..., width] over their root mean square, times ``weight`` [width]."""
        out, width = torch.empty_like(states), states.shape[-1]
        self._calls["rms_norm", states.dtype](
            states.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            states.numel() // width,
            width,
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def gated(self, states: Tensor) -> Tensor:
        """silu of the first half of ``states`` [..., 2 * width], times the second half -> [..., width]."""
        width = states.shape[-1] // 2
        out = states.new_empty(*states.shape[:-1], width)
        rows, threads = out.numel() // width, torch.get_num_threads()
        self._calls["gated", states.dtype](states.data_ptr(), out.data_ptr(), rows, width, threads)
        return out

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``states`` [tokens, heads, head_dim] in place by ``cos`` and ``sin`` [tokens, head_dim]."""
        tokens, heads, width = states.shape
        self._calls["rotate", states.dtype](
            states.data_ptr(),
            states.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            width,
            torch.get_num_threads(),
        )


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, built at the first call (seconds) and kept in the cache folder; None, with a warning, without."""
    try:
        return Kernels(shared_library(SOURCE))
    except (OSError, AttributeError) as error:
        warnings.warn(f"the engine runs without its own CPU kernels, slower: {error}", stacklevel=2)
        return None
