"""Where the files of a staged checkpoint lie, and that a manifest says nothing else (standard library only)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from firsttoken.progressive.checkpoint.names import DTYPES
from firsttoken.study.foreign.faults import Damaged, shown
from firsttoken.study.foreign.schema import plain_name
from firsttoken.study.foreign.tensors import check_tiles

if TYPE_CHECKING:  # it imports this
    from firsttoken.progressive.checkpoint.manifest import Manifest

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
            if odd := next((entry.dtype for entry in part.tensors.values() if entry.dtype not in DTYPES), ""):
                raise Damaged(f"{file} ({part.name}) holds the dtype {odd}, in which no weights are served")
        adapter = stage.adapter
        if adapter and adapter.folder != adapter_folder(stage.name):
            raise Damaged(f"{shown(adapter.folder)} stands where staging puts {adapter_folder(stage.name)!r}")
        if adapter and (absent := {ADAPTER_CONFIG, ADAPTER_WEIGHTS} - adapter.files.keys()):
            raise Damaged(f"{adapter.folder} has no {min(absent)}")
    for name in (*manifest.side, *(name for stage in manifest.stages if stage.adapter for name in stage.adapter.files)):
        if plain_name(name):
            raise Damaged(f"{shown(name)} is no name of a file")


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
