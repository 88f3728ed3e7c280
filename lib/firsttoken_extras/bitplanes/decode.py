"""Planes that have arrived: decoded, and made weights or merged into those that serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from firsttoken.progressiveserve.checkpoint.part_formats import AllocateTensor, StoredPart, stored_tensor
from firsttoken.study.errors import ModelError
from firsttoken_extras.bitplanes.encode import STORED, plane_encoder
from firsttoken_extras.bitplanes.layouts import BLOCK, SPLITS
from firsttoken_extras.bitplanes.streams import Scratch, decodings

AT_ONCE = 4 * BLOCK
"""Words that are merged between two steps: 8 MB, a few milliseconds on one core, less than a step takes."""

Merge = Callable[[], None]


class PlaneRefiner:
    """Merges planes into the weights of one model, which the planes before have made.

    Merges are given to ``between`` some at a time; it calls them when nobody computes with the weights.
    """

    def __init__(self, between: Callable[[Merge], Any]) -> None:
        self._between = between
        # words by parameter and plane: none is merged twice, unless the planes below were put anew in another parameter
        self._merged: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def refine(self, part: StoredPart, file: memoryview, parameters: Callable[[str], nn.Parameter]) -> None:
        """Merge the planes of ``part``, whose ``file`` is there, into ``parameters``. Raises ModelError."""
        waiting: list[Merge] = []
        words = 0
        for name in part.coding.cut:
            for count, merge in self._merges(part, name, file, parameters(name)):
                if waiting and words + count > AT_ONCE:
                    self._between(partial(_together, waiting))
                    waiting, words = [], 0
                waiting.append(merge)
                words += count
        if waiting:
            self._between(partial(_together, waiting))

    def _merges(
        self, part: StoredPart, name: str, file: memoryview, parameter: nn.Parameter
    ) -> Iterator[tuple[int, Merge]]:
        """The steps, each with its number of words, that bring ``parameter`` to what it is with this plane.

        Where the model computes in another dtype than is stored, the stored words are taken from it and put back, which
        is exact: a wider float holds every narrower one.
        """
        weights, coding = parameter.data.view(-1), part.coding
        merged = self._merged.setdefault(parameter, {})
        done = merged.get(coding.plane, 0)  # by a load that failed after it
        if done == len(weights):
            return
        stored_as = coding.cut[name].dtype
        if weights.dtype not in (torch.float32, STORED[stored_as]):
            raise ModelError(
                f"{part.name}: {name} is stored as {STORED[stored_as]} and computes as {weights.dtype}, which does not "
                "hold it: choose the stored dtype, or float32"
            )
        decoded = decodings(part, name, file, len(weights), Scratch())
        streams = [_on(weights.device, stream.take(stream.size)) for stream in decoded]
        made, words = plane_encoder(coding.split, stored_as), _words(weights, STORED[stored_as])
        for start in range(done, len(words), AT_ONCE):

            def merge(start: int = start, some: Tensor = words[start : start + AT_ONCE]) -> None:
                made.refine(some, coding.plane, streams, start)
                merged[coding.plane] = start + len(some)

            yield min(AT_ONCE, len(words) - start), merge


class PlaneReader:
    """Makes weights of ``dtype`` of first planes, one tensor after the other, each in memory of its own: a norm need
    not hold the memory of the planes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._scratch = dtype, Scratch()

    def copied_shapes(self, part: StoredPart) -> list[tuple[int, ...]]:
        """The shapes of all tensors."""
        return [tensor.shape for tensor in part.carried.values()]

    def read(self, part: StoredPart, file: memoryview, data: Tensor, allocate: AllocateTensor) -> dict[str, Tensor]:
        """The tensors of ``part`` from their first planes. Raises ModelError."""
        weights = {name: allocate(tensor.shape) for name, tensor in part.carried.items()}
        for name, tensor in weights.items():
            if name in part.coding.cut:
                self._fill(part, name, file, tensor)
            else:
                tensor.copy_(stored_tensor(part, name, data))
        return weights

    def _fill(self, part: StoredPart, name: str, file: memoryview, weights: Tensor) -> None:
        """Fill ``weights`` from the first plane of the tensor ``name``, whose shape they have, a block at a time."""
        split, dtype = part.coding.split, part.coding.cut[name].dtype
        made, kinds = plane_encoder(split, dtype), SPLITS[split][dtype].planes[part.coding.plane]
        streams = decodings(part, name, file, min(BLOCK, weights.numel()), self._scratch)
        for block in _words(weights.view(-1), STORED[dtype]).split(BLOCK):
            pieces = [stream.take(kind.bytes(len(block))) for kind, stream in zip(kinds, streams, strict=True)]
            made.fill(block, [_on(block.device, piece) for piece in pieces])


def _together(merges: Sequence[Merge]) -> None:
    for merge in merges:
        merge()


def _words(weights: Tensor, stored: torch.dtype) -> Tensor:
    """Return what a cutter works on: patterns where ``weights`` are of the ``stored`` dtype, and the numbers of
    another."""
    return weights.view(torch.int16) if weights.dtype == stored else weights


def _on(device: torch.device, data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).to(device)
