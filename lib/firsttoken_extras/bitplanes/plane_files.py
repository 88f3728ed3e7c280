"""What one file of planes holds: cut from a source's tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from firsttoken.progressiveserve.checkpoint.sources import TensorSource
from firsttoken_extras.bitplanes.codec import encode
from firsttoken_extras.bitplanes.encode import layout_of, plane_encoder
from firsttoken_extras.bitplanes.layouts import stream_name
from firsttoken_extras.bitplanes.native_words import merger

STORED = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


def most_bytes(source: TensorSource, names: Collection[str], split: str, plane: int, whole: Collection[str]) -> int:
    """Bytes of ``plane`` of the tensors ``names``, but for those of ``whole``, no stream of it coded.

    Raises StageError for a dtype that the split does not know.
    """
    total = 0
    for name in names:
        count, dtype = math.prod(source.shapes[name]), source.dtype(name)
        if name in whole:
            total += count * dtype.itemsize
        else:
            layout = layout_of(split, STORED.get(dtype, str(dtype)))
            total += sum(stream.bytes(count) for stream in layout.planes[plane])
    return total


def encoded(
    source: TensorSource, names: Collection[str], split: str, plane: int, whole: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The streams of ``plane`` of each of the tensors ``names``, and those that travel whole, by their name in the
    file; and what a manifest says of those that are cut.

    Raises StageError for a tensor of a dtype that the split does not know.
    """
    merger()  # is built here, so that no start on this machine waits for a compiler
    streams: dict[str, Tensor] = {}
    cut: dict[str, Any] = {}
    for name in names:
        tensor = source.get(name).to("cpu").contiguous()
        if name in whole:
            streams[name] = tensor
            continue
        dtype = STORED[tensor.dtype]
        made = plane_encoder(split, dtype)
        words = tensor.view(torch.int16).flatten()
        sha256 = hashlib.sha256(words.numpy()).hexdigest()
        coded = [encode(stream.numpy().tobytes()) for stream in made.cut(words, plane)]
        for index, (_, data) in enumerate(coded):
            streams[stream_name(name, plane, index)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        codecs = [codec for codec, _ in coded]
        cut[name] = {"dtype": dtype, "shape": list(tensor.shape), "sha256": sha256, "codecs": codecs}
    return streams, cut
