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
    """One tensor of ``shape`` and ``dtype``: ``nbytes`` of the file ``path``, from byte ``offset`` on.

    What is read of it is held against ``sha256`` (hex; "" leaves that out). Raises CacheError when bytes and shape
    disagree.
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str = ""

    def __post_init__(self) -> None:
        needed = prod(self.shape) * self.dtype.itemsize
        if self.nbytes != needed or self.offset < 0:
            raise CacheError(
                f"{self.name}: {self.nbytes} bytes from byte {self.offset} are no {list(self.shape)} of {self.dtype} "
                f"({needed} bytes); store that cache again"
            )
