"""Tensors as bytes: those that lie behind one in memory, and those that are one in a file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from firsttoken.study.dtypes import range_fault
from firsttoken.study.errors import CacheError


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor``: its own memory where that is contiguous and on the CPU, else a copy.

    By way of uint8, because numpy has no bfloat16.
    """
    return memoryview(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy())


def check_numbers(piece: Tensor, name: str = "it") -> None:
    """Raise CacheError unless the numbers of ``piece`` [any shape], which is called ``name``, are such as a layer
    computes with."""
    if not piece.numel():
        return
    low, high = piece.aminmax()  # both are NaN where any number is
    if fault := range_fault(float(low), float(high)):
        raise CacheError(f"{name} holds {fault}, which no layer computes with; store it again")


@dataclass(frozen=True)
class CachePiece:
    """One tensor of ``shape`` and ``dtype`` in the file ``path``, from byte ``offset`` on.

    What is read of it is held against ``sha256`` (hex).
    """

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize
