"""The two bytes of a 16-bit weight, and fields of them packed into streams.

A byte of a stream holds the fields of words that lie far apart, word i, i + n, i + 2n, ... of n bytes: so every step of
packing and of unpacking runs over contiguous memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from firsttoken.progressiveserve.planes.layouts import Field

SIGN_AND_MANTISSA = 0x807F - 0x10000  # of bf16, as int16


class Halves(NamedTuple):
    """The two bytes of words [count], uint8 [count] each, in which no field crosses from one to the other."""

    high: Tensor
    low: Tensor


def halves(words: Tensor, apart: bool) -> Halves:
    """Of int16 words [count]; with ``apart`` the eight bits of bf16's exponent, and its sign before its mantissa."""
    if apart:
        return Halves((words >> 7).to(torch.uint8), ((words & 0x7F) | ((words >> 8) & 0x80)).to(torch.uint8))
    return Halves((words >> 8).to(torch.uint8), words.to(torch.uint8))


def join_into(words: Tensor, found: Halves, apart: bool) -> None:
    """Fill ``words`` with what ``halves`` took apart."""
    if apart:
        words.copy_(found.low.view(torch.int8))  # the sign spreads over the upper byte
        words &= SIGN_AND_MANTISSA
        upper = found.high.to(torch.int16)
        upper <<= 7
        words |= upper
    else:
        words.copy_(found.high.view(torch.int8))
        words <<= 8
        words |= found.low.to(torch.int16)


def pack(found: Halves, field: Field) -> Tensor:
    """The stream of ``field``, uint8 [field.bytes(count)], the first words in the lowest bits."""
    half, low = (found.high, field.low - 8) if field.low >= 8 else (found.low, field.low)
    values = (half >> low) & (2**field.width - 1)
    packed = torch.zeros(field.bytes(half.numel()), dtype=torch.uint8, device=half.device)
    for turn, part in enumerate(values.split(max(1, packed.numel()))):
        packed[: part.numel()] |= part << (turn * field.width)
    return packed


def unpack_into(found: Halves, packed: Tensor, field: Field) -> None:
    """Set the bits of ``field``, which are 0, from the stream ``packed``."""
    half, low = (found.high, field.low - 8) if field.low >= 8 else (found.low, field.low)
    if field.width == 8:
        half.copy_(packed)
        return
    shifts = torch.arange(0, 8, field.width, dtype=torch.uint8, device=packed.device)
    values = (packed >> shifts[:, None]).view(-1)[: half.numel()]  # [turns, bytes], which is the order of the words
    values &= 2**field.width - 1
    values <<= low
    half |= values
