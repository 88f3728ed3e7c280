"""A tensor as the bytes that lie behind it."""

from __future__ import annotations

from torch import Tensor, uint8


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor``: its own memory where that is contiguous and on the CPU, else a copy.

    By way of uint8, because numpy has no bfloat16.
    """
    return memoryview(tensor.detach().to("cpu").contiguous().view(-1).view(uint8).numpy())
