"""First planes made words of their dtype by compiled code and numpy, before torch is imported."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from firsttoken.progressiveserve.checkpoint.part_formats import CodedPart
from firsttoken_extras.bitplanes.layouts import BLOCK, SPLITS
from firsttoken_extras.bitplanes.native_words import Memory, merger
from firsttoken_extras.bitplanes.streams import Scratch, decodings


class FirstWords:
    """Makes words of first planes, one tensor after the other."""

    def __init__(self) -> None:
        self._merge, self._scratch = merger(), Scratch()

    def fill(self, part: CodedPart, name: str, file: memoryview, words: np.ndarray) -> None:
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
            place = block.ctypes.data, len(block)
            self._merge(layout, dtype, coding.plane, place, list(map(_memory, pieces)), floats=False)


def fills(parts: Iterable[CodedPart]) -> bool:
    """Whether :class:`FirstWords` makes words of all of ``parts``: of bits, not of rounded blocks, by compiled code."""
    coded = [(part.coding.split, tensor.dtype) for part in parts for tensor in part.coding.cut.values()]
    return not any(SPLITS[split][dtype].code_bits for split, dtype in coded) and merger() is not None


def _memory(data: memoryview) -> Memory:
    """Where ``data`` lies, which may be read-only, and its bytes."""
    return np.frombuffer(data, np.uint8).ctypes.data, len(data)
