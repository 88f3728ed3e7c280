"""What a staged checkpoint holds: every file, its size and hash, and where each tensor lies in it.

A worker reads this, and starts to move bytes, before it has spent the seconds of ``import torch``: nothing but the
standard library is imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
import typing
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from firsttoken.study.errors import ModelError

MANIFEST = "manifest.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
}
"""What safetensors calls a dtype: its name in torch, and the bytes of one number."""

_FORMAT = "firsttoken-staged-1"
_MEND = "stage it again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ``dtype`` in safetensors' words ("BF16"), ``start`` and ``end`` in bytes from the file's first."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class PartFile:
    """One safetensors file, read as a whole. A "refine" part overwrites tensors that an "add" part has brought.

    ``name`` is "embedding", "layer 07" or "head", ``layer`` the 0-based index where it is a layer; ``file`` is
    relative to the folder.
    """

    name: str
    file: str
    bytes: int
    sha256: str
    action: Literal["add", "refine"]
    layer: int | None
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of a file that is copied as it is."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class AdapterFiles:
    """A PEFT folder, relative to the checkpoint's; ``files`` are the names in it."""

    folder: str
    files: dict[str, FileEntry]

    @property
    def bytes(self) -> int:
        """Bytes of the weights; the rest is a few kB of JSON."""
        return self.files[ADAPTER_WEIGHTS].bytes


@dataclass(frozen=True)
class StageFiles:
    """What one stage brings, in reading order; the adapter belongs to the model as of this stage."""

    name: str
    parts: tuple[PartFile, ...]
    adapter: AdapterFiles | None

    @property
    def bytes(self) -> int:
        """Bytes that must move for this stage: its parts and its adapter's weights."""
        return sum(part.bytes for part in self.parts) + (self.adapter.bytes if self.adapter else 0)


@dataclass(frozen=True)
class Manifest:
    """A staged checkpoint of a model of ``depth`` layers.

    ``dtype`` is torch's name of the one that the tensors have in the end ("bfloat16"). With ``tied`` embeddings no
    file holds lm_head.weight. ``source_sha256`` is None for random weights; ``plan_sha256`` stands for plan, source
    and adapters together, and is the same for the same staging.
    """

    depth: int
    dtype: str
    tied: bool
    source: str
    source_sha256: str | None
    kind: Literal["real", "random"]
    plan_sha256: str
    stages: tuple[StageFiles, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all "add" parts: the model once, without refinements and adapters."""
        return sum(part.bytes for stage in self.stages for part in stage.parts if part.action == "add")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a staged checkpoint.

    Raises ModelError when it is missing, no JSON, of another format, has an unknown or missing key or a value of the
    wrong type, names a path outside ``folder``, or when a tensor's byte range does not fit its shape or its file.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"no staged checkpoint in {folder}: {MANIFEST} cannot be read; {_MEND}") from error
    except ValueError as error:
        raise ModelError(f"{path} is truncated or no JSON; {_MEND}") from error
    found = content.pop("format", None) if isinstance(content, dict) else None
    if found != _FORMAT:
        raise ModelError(f"{path} is of the format {found!r}, not {_FORMAT!r}; {_MEND}")
    try:
        manifest = parse(Manifest, content)
        for file, _, _ in _files(manifest, None):
            if (inside := PurePosixPath(file)).is_absolute() or ".." in inside.parts:
                raise ValueError(f"the path {file!r} leaves the folder")
        for stage in manifest.stages:
            _check_stage(stage, manifest.depth)
    except ValueError as error:
        raise ModelError(f"{path}: {error}; {_MEND}") from error
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` to ``folder``, atomically."""
    from firsttoken.study.files import write_text  # a worker only reads

    content = {"format": _FORMAT} | asdict(manifest)
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def check_files(folder: Path, manifest: Manifest, stages: Collection[int] | None = None) -> None:
    """Look at the sizes of the files of ``stages`` (1-based; all by default) and of nothing inside them.

    Raises ModelError for a file that is missing or truncated.
    """
    for file, what, entry in _files(manifest, stages):
        path = folder / file
        if not path.is_file():
            raise ModelError(f"{file} ({what}) is missing in {folder}; {_MEND}")
        if (size := path.stat().st_size) != entry.bytes:
            raise ModelError(f"{path} ({what}) is truncated or altered ({size:,} of {entry.bytes:,} bytes); {_MEND}")


def verify(folder: Path, manifest: Manifest) -> None:
    """Read everything and compare the sha256 sums. Raises ModelError for the first file that is not as it was."""
    check_files(folder, manifest)
    for file, what, entry in _files(manifest, None):
        with (folder / file).open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != entry.sha256:
            raise ModelError(f"{folder / file} ({what}) is altered: wrong sha256; delete it and {_MEND}")


def parse(hint: Any, value: Any, where: str = "") -> Any:
    """``value``, as JSON gives it, as the type ``hint``: dataclasses, tuples and dicts of them, plain types.

    Raises ValueError naming the place for an unknown key, a missing one or a value of another type.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else parse(inner[0], value, where)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(parse(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: parse(inner[1], item, f"{where}[{key}]") for key, item in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        hints = _hints(hint)
        if odd := sorted(value.keys() ^ hints.keys()):
            raise ValueError(f"{where or 'the top level'} lacks or adds {', '.join(odd)}")
        return hint(**{key: parse(hints[key], item, f"{where}.{key}".lstrip(".")) for key, item in value.items()})
    if type(value) is hint:  # exactly: True is no number of bytes
        return value
    raise ValueError(f"{where or 'the top level'} is {str(value)[:40]!r}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields; looked up anew for each tensor they were most of a manifest's 30 ms."""
    return typing.get_type_hints(kind)


def _check_stage(stage: StageFiles, depth: int) -> None:
    for part in stage.parts:
        if part.layer is not None and not 0 <= part.layer < depth:
            raise ValueError(f"{part.file} is for layer {part.layer} of {depth}")
        for name, entry in part.tensors.items():
            if entry.dtype not in DTYPES:
                raise ValueError(f"{name} is of the dtype {entry.dtype!r}")
            size = math.prod(entry.shape) * DTYPES[entry.dtype][1]
            if entry.end - entry.start != size or not 8 <= entry.start <= entry.end <= part.bytes:
                raise ValueError(
                    f"{name} in {part.file} ({part.name}) has {size:,} bytes by its shape {list(entry.shape)}, "
                    f"and the range {entry.start:,} to {entry.end:,} of {part.bytes:,}"
                )
    if stage.adapter and ADAPTER_WEIGHTS not in stage.adapter.files:
        raise ValueError(f"{stage.adapter.folder} has no {ADAPTER_WEIGHTS}")


def _files(manifest: Manifest, stages: Collection[int] | None) -> Iterator[tuple[str, str, PartFile | FileEntry]]:
    """Relative path, what it is, and the entry with its size and hash."""
    for number, stage in enumerate(manifest.stages, start=1):
        if stages is None or number in stages:
            yield from ((part.file, part.name, part) for part in stage.parts)
            for name, entry in stage.adapter.files.items() if stage.adapter else ():
                yield f"{stage.adapter.folder}/{name}", f"adapter of stage {stage.name}", entry
