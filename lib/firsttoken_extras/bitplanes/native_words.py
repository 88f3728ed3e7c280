"""Calls ``words.cpp``: fields of bits made weights, or merged into them, in one pass over memory.

Torch's operations fill float32 weights from bits of bf16 in 2.1 ns a word and refine them in 2.5 to 4; this takes 0.6
and 0.5 (8 M words, one core with AVX2, the other busy).
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from firsttoken.study.system.compiled import shared_library
from firsttoken_extras.bitplanes.layouts import Field

SOURCE = Path(__file__).with_name("words.cpp")
WIDENED = {torch.bfloat16: 1, torch.float16: 2}  # as words.cpp numbers what the words of float32 weights are


class _Packed(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("low", ctypes.c_int64),
    )


class Merger:
    """The compiled function. Everything lies on the CPU and is contiguous."""

    def __init__(self, file: Path) -> None:
        self._call = ctypes.CDLL(str(file)).merge_planes
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 5]

    def __call__(
        self,
        weights: Tensor,
        stored: torch.dtype,
        fields: Sequence[Field],
        streams: Sequence[Tensor],
        *,
        keep: int,
        middle: int,
        infinite: int,
        apart: bool,
    ) -> None:
        """Set the bits of ``fields`` in ``weights`` [count] (int16 words of ``stored``, or float32 made of them).

        ``streams`` are theirs, uint8; ``keep`` is a mask of the bits that came before, 0 for weights that hold nothing
        yet; ``middle`` the bit to stand for those that come later, but in words from ``infinite`` on; ``apart``: in
        what comes, the sign lies before the mantissa.
        """
        kind = WIDENED[stored] if weights.dtype == torch.float32 else 0
        packed = (_Packed * len(fields))(
            *(_Packed(data.data_ptr(), data.numel(), f.width, f.low) for f, data in zip(fields, streams, strict=True))
        )
        numbers = keep & 0xFFFF, middle, infinite, apart
        if self._call(weights.data_ptr(), weights.numel(), kind, packed, len(fields), *numbers):
            raise AssertionError(f"words.cpp does not know {len(fields)} fields")


@functools.cache
def merger() -> Merger | None:
    """The function, built at the first call (2 s) and kept in the cache folder; None, with a warning, without."""
    try:
        return Merger(shared_library(SOURCE))
    except (OSError, AttributeError) as error:
        warnings.warn(f"planes are merged by torch's own operations, slower: {error}", stacklevel=2)
        return None
