"""One file of planes: written from a source's tensors."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from firsttoken.assets.lock import file_sha256
from firsttoken.progressiveserve.bitplanes.codec import encode
from firsttoken.progressiveserve.bitplanes.encode import cutter, layout_of
from firsttoken.progressiveserve.bitplanes.entries import CutTensor
from firsttoken.progressiveserve.bitplanes.layouts import stream_name
from firsttoken.progressiveserve.bitplanes.native_words import merger
from firsttoken.progressiveserve.checkpoint.manifest import PartFile
from firsttoken.progressiveserve.checkpoint.plan import Part
from firsttoken.progressiveserve.checkpoint.sources import TensorSource
from firsttoken.study.files import replacing
from firsttoken.study.parsing.safetensors_header import read_header

STORED = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


def most_bytes(source: TensorSource, part: Part) -> int:
    """Bytes of the plane that ``part`` brings, no stream of it coded. Raises StageError for a dtype that the split does
    not know."""
    total = 0
    for name in part.tensors:
        count, dtype = math.prod(source.shapes[name]), source.dtype(name)
        if name in part.whole:
            total += count * dtype.itemsize
        else:
            layout = layout_of(part.split, STORED.get(dtype, str(dtype)))
            total += sum(stream.bytes(count) for stream in layout.planes[part.plane])
    return total


def write_planes(source: TensorSource, part: Part, folder: Path, file: str) -> PartFile:
    """Write the plane of each tensor of ``part``, and those that travel whole, to ``file`` in ``folder``.

    Raises StageError for a tensor of a dtype that the split does not know.
    """
    merger()  # is built here, so that no start on this machine waits for a compiler
    streams: dict[str, Tensor] = {}
    cut: dict[str, CutTensor] = {}
    for name in part.tensors:
        tensor = source.get(name).to("cpu").contiguous()
        if name in part.whole:
            streams[name] = tensor
            continue
        dtype = STORED[tensor.dtype]
        made = cutter(part.split, dtype)
        words = tensor.view(torch.int16).flatten()
        sha256 = hashlib.sha256(words.numpy()).hexdigest()
        coded = [encode(stream.numpy().tobytes()) for stream in made.cut(words, part.plane)]
        for index, (_, data) in enumerate(coded):
            streams[stream_name(name, part.plane, index)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        cut[name] = CutTensor(dtype, tuple(tensor.shape), sha256, tuple(codec for codec, _ in coded))
    path = folder / file
    with replacing(path) as temporary:
        save_file(streams, temporary, metadata={"format": "pt"})
    written = read_header(path).tensors
    size, sha256 = path.stat().st_size, file_sha256(path)
    return PartFile(part.name, file, size, sha256, part.action, part.layer, written, part.split, part.plane, cut)
