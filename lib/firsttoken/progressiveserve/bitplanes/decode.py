"""Planes that have arrived: decoded, and made weights or merged into those that serve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firsttoken.progressiveserve.bitplanes.codec import Decoding
from firsttoken.progressiveserve.bitplanes.encode import cutter
from firsttoken.progressiveserve.bitplanes.layouts import BLOCK, SPLITS
from firsttoken.progressiveserve.checkpoint.manifest import PartFile
from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken.study.errors import ModelError

STORED = {"F16": torch.float16, "BF16": torch.bfloat16}
AT_ONCE = 4 * BLOCK
"""Words that are merged between two steps: 8 MB, a few milliseconds on one core, less than a step takes."""

Merge = Callable[[], None]


class Merging(NamedTuple):
    """``words`` of 16 bits that were merged between two steps, in ``seconds``."""

    words: int
    seconds: float


class Planes:
    """What has been merged into the weights of one model.

    Merges are in place, so the model is never there twice: every view of it has the better weights as they come.
    ``between`` calls a merge when nobody computes with the weights: at once, or where an engine runs between two of its
    steps. ``spent`` is what each of these calls took (on a GPU, until it was launched).
    """

    def __init__(self) -> None:
        self.between: Callable[[Merge], Any] = lambda merge: merge()
        self.spent: list[Merging] = []
        self._merged: dict[tuple[str, int], int] = {}  # words, by tensor and plane: none is merged twice

    def place(self, part: PartFile, file: memoryview, parameters: Callable[[str], nn.Parameter]) -> None:
        """Merge the planes of ``part``, whose ``file`` is there, into ``parameters``. Raises ModelError."""
        waiting: list[Merge] = []
        words = 0
        for name in part.cut:
            for count, merge in self._merges(part, name, file, parameters(name)):
                if waiting and words + count > AT_ONCE:
                    self.between(partial(self._together, waiting, words))
                    waiting, words = [], 0
                waiting.append(merge)
                words += count
        if waiting:
            self.between(partial(self._together, waiting, words))

    def _together(self, merges: list[Merge], words: int) -> None:
        begin = time.perf_counter()
        for merge in merges:
            merge()
        self.spent.append(Merging(words, time.perf_counter() - begin))

    def _merges(
        self, part: PartFile, name: str, file: memoryview, parameter: nn.Parameter
    ) -> Iterator[tuple[int, Merge]]:
        """The steps, each with its number of words, that bring ``parameter`` to what it is with this plane.

        Where the model computes in another dtype than is stored, the stored words are taken from it and put back, which
        is exact: a wider float holds every narrower one.
        """
        weights, key = parameter.data.view(-1), (name, part.plane)
        done = self._merged.get(key, 0)  # by a load that failed after it
        if done == len(weights):
            return
        stored_as = part.cut[name].dtype
        if weights.dtype not in (torch.float32, STORED[stored_as]):
            raise ModelError(
                f"{part.name}: {name} is stored as {STORED[stored_as]} and computes as {weights.dtype}, which does not "
                "hold it: choose the stored dtype, or float32"
            )
        decodings = _decodings(part, name, file, len(weights), Scratch())
        streams = [_on(weights.device, stream.take(stream.size)) for stream in decodings]
        made, words = cutter(part.split, stored_as), _words(weights, STORED[stored_as])
        for start in range(done, len(words), AT_ONCE):

            def merge(start: int = start, some: Tensor = words[start : start + AT_ONCE]) -> None:
                made.refine(some, part.plane, streams, start)
                self._merged[key] = start + len(some)

            yield min(AT_ONCE, len(words) - start), merge


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


def first_weights(part: PartFile, name: str, file: memoryview, weights: Tensor, scratch: Scratch) -> None:
    """Fill ``weights`` from the first plane of the tensor ``name``, whose shape they have, a block at a time.

    Raises ModelError.
    """
    tensor = part.cut[name]
    made, kinds = cutter(part.split, tensor.dtype), SPLITS[part.split][tensor.dtype].planes[part.plane]
    streams = _decodings(part, name, file, min(BLOCK, weights.numel()), scratch)
    for block in _words(weights.view(-1), STORED[tensor.dtype]).split(BLOCK):
        pieces = [stream.take(kind.bytes(len(block))) for kind, stream in zip(kinds, streams, strict=True)]
        made.fill(block, [_on(block.device, piece) for piece in pieces])


def _words(weights: Tensor, stored: torch.dtype) -> Tensor:
    """What a cutter works on: patterns where they are of the ``stored`` dtype, and the numbers of another."""
    return weights.view(torch.int16) if weights.dtype == stored else weights


def _on(device: torch.device, data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _decodings(part: PartFile, name: str, file: memoryview, most: int, scratch: Scratch) -> list[Decoding]:
    """The streams of the plane of ``name`` that ``file`` holds, for ``most`` words at a time."""
    tensor, count = part.cut[name], math.prod(part.cut[name].shape)
    kinds = SPLITS[part.split][tensor.dtype].planes[part.plane]
    streams = []
    for number, (kind, key, codec) in enumerate(zip(kinds, part.streams(name), tensor.codecs, strict=True)):
        entry, what, room = part.tensors[key], f"{part.name}: {key}", partial(scratch.room, number, kind.bytes(most))
        streams.append(Decoding(codec, file[entry.start : entry.end], kind.bytes(count), what, room))
    return streams
