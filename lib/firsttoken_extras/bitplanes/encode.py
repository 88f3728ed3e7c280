"""Weights cut into planes, and rebuilt from those that are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes.layouts import BLOCK, INFINITE, SPLITS, Field, Layout
from firsttoken_extras.bitplanes.native_words import merger

# The two bytes of a 16-bit weight, and fields of them packed into streams.
#
# A byte of a stream holds the fields of words that lie far apart, word i, i + n, i + 2n, ... of n bytes: so every
# step of packing and of unpacking runs over contiguous memory.

SIGN_AND_MANTISSA = 0x807F - 0x10000  # of bf16, as int16


class WordBytes(NamedTuple):
    """The two bytes of words [count], uint8 [count] each, in which no field crosses from one to the other."""

    high: Tensor
    low: Tensor


def halves(words: Tensor, apart: bool) -> WordBytes:
    """Split int16 words [count] into halves.

    With ``apart`` these are the eight bits of bf16's exponent, and its sign before its mantissa.
    """
    if apart:
        return WordBytes((words >> 7).to(torch.uint8), ((words & 0x7F) | ((words >> 8) & 0x80)).to(torch.uint8))
    return WordBytes((words >> 8).to(torch.uint8), words.to(torch.uint8))


def join_into(words: Tensor, pair: WordBytes, apart: bool) -> None:
    """Fill ``words`` with what ``halves`` took apart."""
    if apart:
        words.copy_(pair.low.view(torch.int8))  # the sign spreads over the upper byte
        words &= SIGN_AND_MANTISSA
        upper = pair.high.to(torch.int16)
        upper <<= 7
        words |= upper
    else:
        words.copy_(pair.high.view(torch.int8))
        words <<= 8
        words |= pair.low.to(torch.int16)


def pack(pair: WordBytes, field: Field) -> Tensor:
    """The stream of ``field``, uint8 [field.bytes(count)], the first words in the lowest bits."""
    half, low = (pair.high, field.low - 8) if field.low >= 8 else (pair.low, field.low)
    values = (half >> low) & (2**field.width - 1)
    packed = torch.zeros(field.bytes(half.numel()), dtype=torch.uint8, device=half.device)
    for turn, part in enumerate(values.split(max(1, packed.numel()))):
        packed[: part.numel()] |= part << (turn * field.width)
    return packed


def unpack_into(pair: WordBytes, packed: Tensor, field: Field) -> None:
    """Set the bits of ``field``, which are 0, from the stream ``packed``."""
    half, low = (pair.high, field.low - 8) if field.low >= 8 else (pair.low, field.low)
    if field.width == 8:
        half.copy_(packed)
        return
    shifts = torch.arange(0, 8, field.width, dtype=torch.uint8, device=packed.device)
    values = (packed >> shifts[:, None]).view(-1)[: half.numel()]  # [turns, bytes], which is the order of the words
    values &= 2**field.width - 1
    values <<= low
    half |= values


MAGNITUDE = 0x7FFF  # all bits but the sign
STORED = {"F16": torch.float16, "BF16": torch.bfloat16}  # what is cut, by safetensors' words
STORED_AS = {dtype: word for word, dtype in STORED.items()} | {torch.float32: "F32"}


class PlaneEncoder(ABC):
    """Cuts tensors of one dtype by one layout, block after block (``layouts.BLOCK``).

    Words are int16 [count], the patterns of the weights in order; streams are uint8 [bytes], as the layout lists them.
    """

    def __init__(self, layout: Layout, dtype: str) -> None:
        self._layout, self._stored = layout, dtype
        self._planes, self._dtype, self._infinite = layout.planes, STORED[dtype], INFINITE[dtype]
        self._bits, self._apart = layout.code_bits, layout.exponent_apart

    def cut(self, words: Tensor, plane: int) -> list[Tensor]:
        """Return the streams of ``plane`` (0-based) of ``words``."""
        blocks = [self._cut(block, plane) for block in words.split(BLOCK)]
        return [torch.cat(parts) for parts in zip(*blocks, strict=True)]

    def first(self, streams: Sequence[Tensor], count: int) -> Tensor:
        """Words [count] from the first plane alone: exact where it is the only one."""
        words = torch.empty(count, dtype=torch.int16, device=streams[0].device)
        for start in range(0, count, BLOCK):
            block = words[start : start + BLOCK]
            self.fill(block, self._within(streams, 0, start, len(block)))
        return words

    def fill(self, weights: Tensor, streams: Sequence[Tensor]) -> None:
        """Fill one block of ``weights`` [count], int16 words or numbers of another dtype, from its ``streams``."""
        if weights.dtype == torch.int16:
            self._begin(weights, streams)
        else:
            words = torch.empty_like(weights, dtype=torch.int16)
            self._begin(words, streams)
            weights.copy_(words.view(self._dtype))

    def refine(self, weights: Tensor, plane: int, streams: Sequence[Tensor], start: int = 0) -> None:
        """Bring ``weights``, made of all planes below ``plane``, to what they are with it, in place; once a plane.

        They may be a part of the tensor's, from the word ``start`` on, a multiple of BLOCK; ``streams`` are all. From
        float32 the words are taken and put back, which is exact: a wider float holds every narrower one.
        """
        for first in range(0, len(weights), BLOCK):
            block = weights[first : first + BLOCK]
            self._refine_block(block, plane, self._within(streams, plane, start + first, len(block)))

    def _refine_block(self, weights: Tensor, plane: int, streams: Sequence[Tensor]) -> None:
        if weights.dtype == torch.int16:
            self._refine(weights, plane, streams)
        else:
            stored = weights.to(self._dtype)
            self._refine(stored.view(torch.int16), plane, streams)
            weights.copy_(stored)

    def _within(self, streams: Sequence[Tensor], plane: int, start: int, count: int) -> list[Tensor]:
        """Cut out of each stream what belongs to ``count`` words from ``start`` on."""
        kinds = zip(self._planes[plane], streams, strict=True)
        return [stream[kind.bytes(start) : kind.bytes(start) + kind.bytes(count)] for kind, stream in kinds]

    @abstractmethod
    def _cut(self, words: Tensor, plane: int) -> list[Tensor]:
        """Return the streams of ``plane`` of one block of ``words``."""

    @abstractmethod
    def _begin(self, words: Tensor, streams: Sequence[Tensor]) -> None:
        """Fill the ``words`` of one block from its first plane."""

    @abstractmethod
    def _refine(self, words: Tensor, plane: int, streams: Sequence[Tensor]) -> None:
        """Refine the ``words`` of one block."""


class BitPlaneEncoder(PlaneEncoder):
    """The bits of the word from the highest down. Bits that are not there stand at the middle of what they can be.

    A word that may be an infinity keeps zeros there, so that an infinity is one from the first plane on; a NaN whose
    mantissa begins with zeros looks like one until its own bits come.
    """

    def _cut(self, words: Tensor, plane: int) -> list[Tensor]:
        pair = halves(words, self._apart)
        return [pack(pair, field) for field in self._planes[plane]]

    def fill(self, weights: Tensor, streams: Sequence[Tensor]) -> None:
        if not self._merge(weights, 0, streams):
            super().fill(weights, streams)

    def _refine_block(self, weights: Tensor, plane: int, streams: Sequence[Tensor]) -> None:
        if not self._merge(weights, plane, streams):
            super()._refine_block(weights, plane, streams)

    def _merge(self, weights: Tensor, plane: int, streams: Sequence[Tensor]) -> bool:
        """Merge by compiled code, and return whether there is any for where ``weights`` lie."""
        supported = weights.device.type == "cpu" and weights.dtype in (torch.int16, torch.float32)
        if not supported or (merge := merger()) is None:
            return False
        arguments = (self._layout, self._stored, plane, (weights.data_ptr(), weights.numel()))
        streams = [(stream.data_ptr(), stream.numel()) for stream in streams]
        merge(*arguments, streams, floats=weights.dtype == torch.float32)
        return True

    def _begin(self, words: Tensor, streams: Sequence[Tensor]) -> None:
        high, *others = streams  # the first field is the upper byte, in every layout
        middle = self._layout.middle(0)
        pair = WordBytes(high, torch.full_like(high, middle))
        for field, packed in zip(self._planes[0][1:], others, strict=True):
            unpack_into(pair, packed, field)
        join_into(words, pair, self._apart)
        most = self._infinite >> 7 if self._apart else self._infinite >> 8
        if middle and int((high if most == 0xFF else high & most).max()) == most:
            self._zero_infinities(words, middle)

    def _refine(self, words: Tensor, plane: int, streams: Sequence[Tensor]) -> None:
        middle, low = self._layout.middle(plane), torch.zeros(len(words), dtype=torch.uint8, device=words.device)
        for field, packed in zip(self._planes[plane], streams, strict=True):
            unpack_into(WordBytes(low, low), packed, field)  # all in the lower byte: the upper came first
        words &= -1 << self._layout.unknown(plane - 1)
        words |= (low | middle).to(torch.int16)
        if middle:
            self._zero_infinities(words, middle)

    def _zero_infinities(self, words: Tensor, middle: int) -> None:
        words[(words & MAGNITUDE) >= self._infinite] &= ~middle


class BlockPlaneEncoder(PlaneEncoder):
    """Codes of a few bits with a factor for each group first; then how many numbers of the dtype they are off by.

    The first plane is computed in fp32 by one multiplication and one rounding, which every machine does alike: so what
    is off is known exactly when it is staged. Of a group with an infinity or a NaN the finite weights make the factor.
    """

    def _cut(self, words: Tensor, plane: int) -> list[Tensor]:
        *fields, scales = self._planes[0]
        weights = words.view(self._dtype).float().nan_to_num(0.0, 0.0, 0.0)
        groups = pad(weights, (0, -len(words) % scales.group)).view(-1, scales.group)
        factors = (groups.abs().amax(1) / self._most).to(self._dtype)
        wide = factors.float()
        steps = (groups / torch.where(wide > 0, wide, 1.0)[:, None]).round().clamp(-self._most, self._most)
        codes = (steps.flatten()[: len(words)] + self._most).to(torch.uint8)
        coarse = [*(pack(WordBytes(codes, codes), field) for field in fields), factors.view(torch.uint8)]
        if plane == 0:
            return coarse
        rounded = torch.empty_like(words)
        self._begin(rounded, coarse)
        off = _ordered(words) - _ordered(rounded)
        off = (off << 1) ^ (off >> 15)  # small either way is small: the high byte is then nearly always 0
        return [pack(halves(off, False), field) for field in self._planes[1]]

    def _begin(self, words: Tensor, streams: Sequence[Tensor]) -> None:
        *fields, scales = self._planes[0]
        codes = torch.zeros(len(words) + -len(words) % scales.group, dtype=torch.uint8, device=words.device)
        for field, packed in zip(fields, streams[:-1], strict=True):
            unpack_into(WordBytes(codes[: len(words)], codes[: len(words)]), packed, field)
        steps = codes.view(-1, scales.group).float() - self._most
        factors = streams[-1].clone().view(self._dtype).float()  # a clone is aligned
        words.copy_((steps * factors[:, None]).to(self._dtype).flatten()[: len(words)].view(torch.int16))

    def _refine(self, words: Tensor, plane: int, streams: Sequence[Tensor]) -> None:
        pair = WordBytes(*torch.zeros(2, len(words), dtype=torch.uint8, device=words.device))
        for field, packed in zip(self._planes[plane], streams, strict=True):
            unpack_into(pair, packed, field)
        off = torch.empty_like(words)
        join_into(off, pair, False)
        off = ((off >> 1) & MAGNITUDE) ^ -(off & 1)
        words.copy_(_ordered(_ordered(words) + off))

    @property
    def _most(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self._bits - 1) - 1


def _ordered(words: Tensor) -> Tensor:
    """Integers in the order of the numbers that ``words`` are, one each; its own inverse."""
    return words ^ ((words >> 15) & MAGNITUDE)


def plane_encoder(split: str, dtype: str) -> PlaneEncoder:
    """Return an encoder that cuts a tensor of ``dtype`` ("BF16") by ``split``. Raises StageError when the split does
    not know it."""
    layout = layout_of(split, dtype)
    return (BlockPlaneEncoder if layout.code_bits else BitPlaneEncoder)(layout, dtype)


def layout_of(split: str, dtype: str) -> Layout:
    """Return the layout of ``dtype`` by ``split``. Raises StageError for a split that does not exist, and a dtype that
    it does not know."""
    if split not in SPLITS:
        raise StageError(f"no split of weights is called {split!r}: choose one of {', '.join(SPLITS)}")
    if dtype not in SPLITS[split]:
        names = " or ".join(SPLITS[split])
        raise StageError(f"no split cuts {dtype}: store the weights as {names} (dtype: bfloat16), or stage them whole")
    return SPLITS[split][dtype]
