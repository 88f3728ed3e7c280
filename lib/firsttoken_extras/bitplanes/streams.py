"""The streams of a plane in a file that has arrived, decoded a piece at a time, and first planes made words of their
dtype by compiled code before torch is imported."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import numpy as np

from firsttoken.progressiveserve.checkpoint.part_formats import StoredPart
from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken_extras.bitplanes.codec import Decoding
from firsttoken_extras.bitplanes.layouts import BLOCK, SPLITS
from firsttoken_extras.bitplanes.native_words import Memory, merger


class Scratch:
    """Memory for pieces of decoded streams, for one tensor after the other: to map it for each waits for those who have
    pages backed meanwhile."""

    def __init__(self) -> None:
        self._rooms: dict[int, memoryview] = {}

    def room(self, number: int, size: int) -> memoryview:
        """``size`` bytes for the streams that have this ``number`` in their plane."""
        if len(self._rooms.get(number, b"")) < size:
            self._rooms[number] = host_memory(size)
        return self._rooms[number]


def decodings(part: StoredPart, name: str, file: memoryview, most: int, scratch: Scratch) -> list[Decoding]:
    """The streams of the plane of ``name`` that ``file`` holds, for ``most`` words at a time. Raises ModelError."""
    coding = part.coding
    tensor, count = coding.cut[name], math.prod(coding.cut[name].shape)
    kinds = SPLITS[coding.split][tensor.dtype].planes[coding.plane]
    streams = []
    for number, (kind, key, codec) in enumerate(zip(kinds, coding.entries(name), tensor.codecs, strict=True)):
        entry, label, room = part.tensors[key], f"{part.name}: {key}", partial(scratch.room, number, kind.bytes(most))
        streams.append(Decoding(codec, file[entry.start : entry.end], kind.bytes(count), label, room))
    return streams


class FirstWords:
    """Makes words of first planes, one tensor after the other."""

    def __init__(self) -> None:
        self._merge, self._scratch = merger(), Scratch()

    def fill(self, part: StoredPart, name: str, file: memoryview, words: np.ndarray) -> None:
        """Fill ``words``, uint16 [count], of the tensor ``name`` from its first plane, a block at a time. Raises
        ModelError."""
        coding, count = part.coding, len(words)
        dtype = coding.cut[name].dtype
        layout = SPLITS[coding.split][dtype]
        kinds = layout.planes[coding.plane]
        streams = decodings(part, name, file, min(BLOCK, count), self._scratch)
        for start in range(0, count, BLOCK):
            block = words[start : start + BLOCK]
            pieces = [stream.take(kind.bytes(len(block))) for kind, stream in zip(kinds, streams, strict=True)]
            target = block.ctypes.data, len(block)
            self._merge(layout, dtype, coding.plane, target, list(map(_memory, pieces)), floats=False)


def fills(parts: Iterable[StoredPart]) -> bool:
    """Return whether :class:`FirstWords` makes words of all of ``parts``: of bits, not of rounded blocks, by compiled
    code."""
    coded = [(part.coding.split, tensor.dtype) for part in parts for tensor in part.coding.cut.values()]
    return not any(SPLITS[split][dtype].code_bits for split, dtype in coded) and merger() is not None


def _memory(data: memoryview) -> Memory:
    """Say where ``data`` lies, which may be read-only, and of how many bytes it is."""
    return np.frombuffer(data, np.uint8).ctypes.data, len(data)
