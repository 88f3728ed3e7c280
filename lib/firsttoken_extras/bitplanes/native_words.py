"""Calls ``words.cpp``: fields of bits made weights, or merged into them, in one pass over memory (no torch).

Torch's operations fill float32 weights from bits of bf16 in 2.1 ns a word and refine them in 2.5 to 4; this takes 0.6
and 0.5 (8 M words, one core with AVX2, the other busy).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

from firsttoken.study.system.compiled import TorchAlone, say_once, shared_library
from firsttoken_extras.bitplanes.layouts import INFINITE, Layout

SOURCE = Path(__file__).with_name("words.cpp")
WIDENED = {"BF16": 1, "F16": 2}  # as words.cpp numbers what the words of float32 weights are

Memory = tuple[int, int]
"""An address, and how many numbers lie there."""


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
        self, layout: Layout, dtype: str, plane: int, weights: Memory, streams: Sequence[Memory], *, floats: bool
    ) -> None:
        """Set the bits of ``plane`` (0-based) of ``layout`` in ``weights``, which hold those of the planes before it.

        They are words of ``dtype`` ("BF16"), or, ``floats``, float32 numbers made of them. ``streams`` are uint8. Bits
        that come later stand at the middle of what they can be, but in words that may be infinite.
        """
        fields = layout.planes[plane]
        packed = (_Packed * len(fields))(
            *(_Packed(*data, field.width, field.low) for field, data in zip(fields, streams, strict=True))
        )
        keep = -1 << layout.unknown(plane - 1) & 0xFFFF if plane else 0  # a mask of the bits that came before
        numbers = keep, layout.middle(plane), INFINITE[dtype], layout.exponent_apart
        if self._call(*weights, WIDENED[dtype] if floats else 0, packed, len(fields), *numbers):
            raise AssertionError(f"words.cpp does not know {len(fields)} fields")


@functools.cache
def merger() -> Merger | None:
    """The function, built at the first call (2 s) and kept in the cache folder; None without, and a line says why
    where the environment does not ask for that."""
    try:
        return Merger(shared_library(SOURCE))
    except TorchAlone:
        return None
    except (OSError, AttributeError) as error:
        say_once(f"planes are merged by torch's own operations, slower: {error}")
        return None
