"""Where the files of a staged checkpoint lie, and that a manifest says nothing else (standard library only)."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from firsttoken.progressiveserve.checkpoint.names import DTYPES
from firsttoken.progressiveserve.planes.layouts import SPLITS
from firsttoken.study.foreign.faults import Damaged, shown
from firsttoken.study.foreign.schema import plain_name
from firsttoken.study.foreign.tensors import check_tiles

if TYPE_CHECKING:  # it imports this
    from firsttoken.progressiveserve.checkpoint.manifest import Manifest, PartFile

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def part_file(stage_number: int, stage: str, index: int, part: str) -> str:
    """The file of a part, ``index`` within its stage: both orders show in the name, and nothing of another folder."""
    return f"{stage_number}-{_plain(stage)}/{index:03}-{_plain(part)}.safetensors"


def adapter_folder(stage: str) -> str:
    """The folder of a stage's adapter."""
    return f"adapters/{_plain(stage)}"


def check_layout(manifest: Manifest) -> None:
    """Raise Damaged unless every file has the place and the name that staging gives it, and tensors fill its data."""
    if not manifest.stages or CONFIG not in manifest.side:
        raise Damaged(f"it has no stages, or no {CONFIG}")
    for number, stage in enumerate(manifest.stages, start=1):
        for index, part in enumerate(stage.parts):
            if part.file != (file := part_file(number, stage.name, index, part.name)):
                raise Damaged(f"{shown(part.file)} stands where staging puts {file!r}")
            if not part.tensors:
                raise Damaged(f"{file} ({part.name}) holds no tensor")
            check_tiles(part.tensors, part.data_start, part.bytes, f"{file} ({part.name})")
            _check_planes(part, f"{file} ({part.name})")
            whole = (entry for name, entry in part.brought.items() if name not in part.cut)
            if odd := next((entry.dtype for entry in whole if entry.dtype not in DTYPES), ""):
                raise Damaged(f"{file} ({part.name}) holds the dtype {odd}, in which no weights are served")
        adapter = stage.adapter
        if adapter and adapter.folder != adapter_folder(stage.name):
            raise Damaged(f"{shown(adapter.folder)} stands where staging puts {adapter_folder(stage.name)!r}")
        if adapter and (absent := {ADAPTER_CONFIG, ADAPTER_WEIGHTS} - adapter.files.keys()):
            raise Damaged(f"{adapter.folder} has no {min(absent)}")
    for name in (*manifest.side, *(name for stage in manifest.stages if stage.adapter for name in stage.adapter.files)):
        if plain_name(name):
            raise Damaged(f"{shown(name)} is no name of a file")


def _check_planes(part: PartFile, what: str) -> None:
    """Raise Damaged unless the file has, for each of its cut tensors, the streams of its plane, none above its size."""
    if bool(part.split) != bool(part.cut):
        raise Damaged(f"{what} is cut and names no split, or the other way round")
    for name, tensor in part.cut.items():
        layout = SPLITS.get(part.split, {}).get(tensor.dtype)
        planes = layout.planes if layout else ()
        if part.plane >= len(planes) or len(planes[part.plane]) != len(tensor.codecs):
            raise Damaged(f"{what} has a plane of {name} that the split {shown(part.split)} of {tensor.dtype} has not")
        for stream, key, codec in zip(planes[part.plane], part.streams(name), tensor.codecs, strict=True):
            entry, size = part.tensors.get(key), stream.bytes(math.prod(tensor.shape))
            if entry is None or entry.dtype != "U8" or len(entry.shape) != 1:
                raise Damaged(f"{what} has no stream {key}")
            if entry.shape[0] > size or (codec == "raw" and entry.shape[0] != size):
                raise Damaged(f"{what}: the stream {key} has {entry.shape[0]:,} bytes, and decoded it has {size:,}")


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
