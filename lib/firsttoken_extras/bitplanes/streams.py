"""The streams of a plane in a file that has arrived, decoded a piece at a time (no torch)."""

from __future__ import annotations

import math
from functools import partial

from firsttoken.progressiveserve.checkpoint.part_formats import CodedPart
from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken_extras.bitplanes.codec import Decoding
from firsttoken_extras.bitplanes.layouts import SPLITS


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


def decodings(part: CodedPart, name: str, file: memoryview, most: int, scratch: Scratch) -> list[Decoding]:
    """The streams of the plane of ``name`` that ``file`` holds, for ``most`` words at a time. Raises ModelError."""
    coding = part.coding
    tensor, count = coding.cut[name], math.prod(coding.cut[name].shape)
    kinds = SPLITS[coding.split][tensor.dtype].planes[coding.plane]
    streams = []
    for number, (kind, key, codec) in enumerate(zip(kinds, coding.entries(name), tensor.codecs, strict=True)):
        entry, what, room = part.tensors[key], f"{part.name}: {key}", partial(scratch.room, number, kind.bytes(most))
        streams.append(Decoding(codec, file[entry.start : entry.end], kind.bytes(count), what, room))
    return streams
