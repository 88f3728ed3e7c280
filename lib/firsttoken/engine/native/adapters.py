"""LoRA's halves as the kernels read them beside a packed weight (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from firsttoken.engine.native.exports import Exports

Halves = tuple[np.ndarray, np.ndarray]
"""What LoRA adds to one linear layer: A [rank, in] and B [out, rank] in float32, B already scaled."""


class PackedAdapter(NamedTuple):
    """What the last five ``fields`` of a weight say of its adapter, and the arrays that they point at."""

    fields: list[int]
    kept: tuple[np.ndarray, ...]


def packed_adapter(
    exports: Exports, dtype: str, weight: np.ndarray, parts: Sequence[int], halves: Sequence[Halves | None]
) -> PackedAdapter | None:
    """LoRA's correction of a weight of ``dtype`` whose fields are ``weight``: its ``parts`` are the outputs of the
    linear layers that it is made of, each of which has ``halves`` or None.

    None where the kernels cannot: where the outputs of two of the linear layers share half a panel.
    """
    there = [pair for pair in halves if pair is not None]
    rank = max(len(a) for a, _ in there)
    b = np.zeros((sum(parts), rank), np.float32)
    offsets = np.empty(len(b), np.int64)
    output = offset = 0
    for outputs, pair in zip(parts, halves, strict=True):
        offsets[output : output + outputs] = offset
        if pair is not None:
            b[output : output + outputs, : len(pair[0])] = pair[1]
            offset += len(pair[0])
        output += outputs
    most = 2 * (len(b) // exports.panel + 2)  # halves of panels, as many as a gated weight can have, too
    packed, places = np.zeros(most * rank * exports.panel // 2, np.float32), np.zeros(most, np.int64)
    if not exports.call("pack_adapter", dtype, b, offsets, rank, weight, packed, places):
        return None
    # every output reads rank numbers from its offset on, one whose adapter is smaller and one that has none, too
    a = np.zeros((int(offsets.max()) + rank, there[0][0].shape[1]), np.float32)
    a[: sum(len(pair[0]) for pair in there)] = np.concatenate([pair[0] for pair in there])
    return PackedAdapter([a.ctypes.data, packed.ctypes.data, places.ctypes.data, len(a), rank], (a, packed, places))
