"""The manifest of a staged checkpoint: every file, its size and hash, and where each tensor lies in it.

A worker reads this, and starts to move bytes, before it has spent the seconds of ``import torch``: nothing but the
standard library is imported. What follows from the tensors (dtype, tied embeddings) is not written down, so that
it cannot say otherwise; :func:`check_complete` holds it against the model when it was written, and before a stage
serves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from firsttoken.progressiveserve.checkpoint.names import COARSE, DTYPES, EMBEDDING, HEAD
from firsttoken.progressiveserve.checkpoint.part_formats import PartCoding, PartTensor, format_of
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Part, Stage
from firsttoken.study.canonical_json import sha256_of
from firsttoken.study.errors import ModelError, StageError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, regular_size, shown
from firsttoken.study.parsing.safetensors_header import METADATA, TensorEntry, check_tiles, header_table
from firsttoken.study.parsing.schema import at_least, digits, parse_as, plain_name

# Where the files of a staged checkpoint lie, and that a manifest says nothing else (standard library only).

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def part_file(stage_number: int, stage: str, index: int, part: str) -> str:
    """The file of a part, ``index`` within its stage: both orders show in the name, and nothing of another folder."""
    return f"{stage_number}-{_plain(stage)}/{index:03}-{_plain(part)}.safetensors"


def adapter_folder(stage: str) -> str:
    """The folder of a stage's adapter."""
    return f"adapters/{_plain(stage)}"


def check_layout(manifest: Manifest) -> None:
    """Raise ParseError unless each file lies where staging puts it, under its name, and tensors fill its data."""
    if not manifest.stages or CONFIG not in manifest.side:
        raise ParseError(f"it has no stages, or no {CONFIG}")
    for number, stage in enumerate(manifest.stages, start=1):
        for index, part in enumerate(stage.parts):
            if part.file != (file := part_file(number, stage.name, index, part.name)):
                raise ParseError(f"{shown(part.file)} stands where staging puts {file!r}")
            if not part.tensors:
                raise ParseError(f"{file} ({part.name}) holds no tensor")
            check_tiles(part.tensors, part.data_start, part.bytes, f"{file} ({part.name})")
            part.coding.check(part.tensors, f"{file} ({part.name})")
            if unknown_dtype := next(
                (tensor.dtype for tensor in part.carried.values() if tensor.dtype not in DTYPES), ""
            ):
                raise ParseError(
                    f"{file} ({part.name}) holds the dtype {unknown_dtype}, in which no weights are served"
                )
        adapter = stage.adapter
        if adapter and adapter.folder != adapter_folder(stage.name):
            raise ParseError(f"{shown(adapter.folder)} stands where staging puts {adapter_folder(stage.name)!r}")
        if adapter and (absent := {ADAPTER_CONFIG, ADAPTER_WEIGHTS} - adapter.files.keys()):
            raise ParseError(f"{adapter.folder} has no {min(absent)}")
    for name in (*manifest.side, *(name for stage in manifest.stages if stage.adapter for name in stage.adapter.files)):
        if plain_name(name):
            raise ParseError(f"{shown(name)} is no name of a file")


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


MANIFEST = "manifest.json"
FORMAT = "firsttoken-staged-3"
MEND = "stage it again"

Bytes = Annotated[int, at_least(0)]
Sha256 = Annotated[str, digits(64)]


@dataclass(frozen=True)
class PartFile:
    """One safetensors file, read as a whole. A "refine" part overwrites tensors that an "add" part has brought.

    With a ``format`` the file holds tensors otherwise than as they are (``part_formats``), and ``content`` is what the
    format says of them; its "refine" parts refine what the parts before have brought.

    ``name`` is "embedding", "layer 07" or "head", ``layer`` the 0-based index where it is a layer; ``file`` is
    relative to the folder (``check_layout``).
    """

    name: str
    file: str
    bytes: Bytes
    sha256: Sha256
    action: Literal["add", "refine"]
    layer: int | None
    tensors: dict[str, TensorEntry]
    format: str = ""
    content: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def coding(self) -> PartCoding:
        """Return what the format says of the part. Raises ParseError, and ModelError for a format that is not here."""
        return format_of(self.format).read(self.content)

    @property
    def refines(self) -> bool:
        """Return whether the part refines weights that are there, which it does not bring itself."""
        return self.coding.refines

    @cached_property
    def carried(self) -> Mapping[str, PartTensor]:
        """The model's tensors that it brings or refines, with the dtype and shape that they have in the end."""
        return self.coding.tensors(self.tensors)

    @property
    def data_start(self) -> int:
        """Bytes of the header, which ends where the data begin."""
        return min(entry.start for entry in self.tensors.values())


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of a file that is copied as it is."""

    bytes: Bytes
    sha256: Sha256


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
    """The files of one stage, in reading order; the adapter belongs to the model as of this stage."""

    name: str
    parts: tuple[PartFile, ...]
    adapter: AdapterFiles | None

    @property
    def bytes(self) -> int:
        """Bytes that must move for this stage: its parts and its adapter's weights."""
        return sum(part.bytes for part in self.parts) + (self.adapter.bytes if self.adapter else 0)


@dataclass(frozen=True)
class Manifest:
    """A staged checkpoint of a model.

    ``source_sha256`` is None for random weights; ``plan_sha256`` stands for plan, source and adapters together, and is
    the same for the same staging. ``side`` are the files beside the weights: config.json, the tokenizer's.
    """

    source: str
    source_sha256: str | None
    kind: Literal["real", "random"]
    plan_sha256: Sha256
    side: dict[str, FileEntry]
    stages: tuple[StageFiles, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all "add" parts and of what refines them: the model once, without what overwrites it and
        adapters."""
        parts = (part for stage in self.stages for part in stage.parts)
        return sum(part.bytes for part in parts if part.action == "add" or part.refines)

    @property
    def formats(self) -> frozenset[str]:
        """The formats of files that hold tensors otherwise than as they are, which stock transformers cannot read."""
        return frozenset(part.format for stage in self.stages for part in stage.parts if part.format)

    @cached_property
    def plan(self) -> LoadPlan:
        """Return the plan by which parts are brought, without the files."""
        return LoadPlan(tuple(Stage(stage.name, tuple(map(_planned, stage.parts))) for stage in self.stages))

    @cached_property
    def tied(self) -> bool:
        """Return whether the head is the embedding: no file holds it."""
        return not any(HEAD in part.carried for stage in self.stages for part in stage.parts)

    @cached_property
    def dtype(self) -> str:
        """Torch's name of the dtype that the embedding has in the end ("bfloat16")."""
        last = [part for stage in self.stages for part in stage.parts if EMBEDDING in part.carried]
        if not last:
            raise ModelError(f"a staged checkpoint without {EMBEDDING} is of no Llama-like model; {MEND}")
        return DTYPES[last[-1].carried[EMBEDDING].dtype][0]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a staged checkpoint.

    Raises ModelError when it is missing, no JSON, of another format, was edited, has an unknown or missing key or a
    value of the wrong type, names a file otherwise than staging does, or when a tensor's byte range does not fit its
    shape or its file. Whether the tensors are those of a model, its config.json knows (:func:`check_complete`).
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ModelError(f"no staged checkpoint in {folder}: it has no {MANIFEST}; {MEND}")
    with errors_as(path, ModelError, MEND):
        content = read_json(path)
        version = content.pop("format", None) if isinstance(content, dict) else None
        if version != FORMAT:
            raise ParseError(f"it is of the format {version!r}, not {FORMAT!r}")
        if content.pop("sha256", None) != sha256_of(content):
            raise ParseError("it does not fit its own sha256, so it was altered")
        manifest = parse_as(Manifest, content)
        check_layout(manifest)
        return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` to ``folder``, whole or not at all."""
    from firsttoken.study.files import write_text  # a worker only reads

    content = asdict(manifest)
    sealed = {"format": FORMAT, "sha256": sha256_of(content)} | content
    write_text(folder / MANIFEST, json.dumps(sealed, indent=1) + "\n")


def check_files(folder: Path, manifest: Manifest, stages: Collection[int] | None = None) -> None:
    """Look at the sizes of the files of ``stages`` (1-based; all by default) and beside them, and of nothing inside.

    Raises ModelError for a file that is missing or truncated.
    """
    for file, subject, entry in _files(manifest, stages):
        path = folder / file
        if not path.is_file():
            raise ModelError(f"{file} ({subject}) is missing in {folder}; {MEND}")
        if (size := path.stat().st_size) != entry.bytes:
            raise ModelError(f"{path} ({subject}) is truncated or altered ({size:,} of {entry.bytes:,} bytes); {MEND}")


def check_side(folder: Path, manifest: Manifest, *names: str) -> None:
    """Compare ``names`` of what lies beside the weights (all by default) with their hashes. Raises ModelError."""
    for name in names or manifest.side:
        path, entry = folder / name, manifest.side[name]
        with errors_as(path, ModelError, MEND):
            if regular_size(path) != entry.bytes or _sha256(path) != entry.sha256:
                raise ModelError(f"{path} (beside the weights) is altered: wrong sha256; delete it and {MEND}")


def check_complete(folder: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold what ``manifest`` brings against ``shapes``: the model's parameters by name, without a tied head.

    That its files are filled by their tensors to the last byte, ``check_layout`` has checked. So every byte of the
    model is brought once: no part can be lost, doubled or shortened without an error here.
    Raises ModelError for a parameter that no stage brings, one that the model does not have, or brings twice, or has in
    another shape; for a layer in pieces; and for what stays rounded in the end.
    What several parts bring of a tensor must be of one: of the same dtype, and of the same bytes in the end.
    """
    try:
        manifest.plan.check(list(shapes))
    except StageError as error:
        raise ModelError(f"{folder} does not stage the model of its {CONFIG}: {error}; {MEND}") from error
    whose: dict[str, str] = {}
    for part in (part for stage in manifest.stages for part in stage.parts):
        for name, tensor in part.carried.items():
            if tensor.shape != shapes[name]:
                raise ModelError(
                    f"{folder}: {part.name} brings {name} as {list(tensor.shape)}, by {CONFIG} it has the shape "
                    f"{list(shapes[name])}; {MEND}"
                )
            identity = part.coding.identity(name)
            if identity and whose.setdefault(name, identity) != identity:
                raise ModelError(f"{folder}: {part.file} holds {name} of another checkpoint; {MEND}")


def check_header(part: PartFile, header: bytes) -> None:
    """Raise ModelError unless a file that begins with ``header`` says of its tensors what the manifest says."""
    with errors_as(part.file, ModelError, MEND):
        length = int.from_bytes(header[:8], "little") + 8
        table = json.loads(header[8:])  # without limits, and in a tenth of the time: it must equal what is known
        entries = (
            {name: entry for name, entry in table.items() if name != METADATA} if isinstance(table, dict) else table
        )
        if length != part.data_start or entries != header_table(part.tensors, length):
            raise ParseError(f"its header and {MANIFEST} say different things of its tensors")


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _planned(part: PartFile) -> Part:
    coarse = next((entry.dtype for entry in part.tensors.values() if entry.dtype in COARSE), None)
    coding = part.coding.planned(part.tensors)
    return Part(part.name, tuple(part.carried), part.layer, part.action, coarse, coding)


def _files(manifest: Manifest, stages: Collection[int] | None) -> Iterator[tuple[str, str, PartFile | FileEntry]]:
    """Relative path, what it is, and the entry with its size and hash."""
    yield from ((name, "beside the weights", entry) for name, entry in manifest.side.items())
    for number, stage in enumerate(manifest.stages, start=1):
        if stages is None or number in stages:
            yield from ((part.file, part.name, part) for part in stage.parts)
            for name, entry in stage.adapter.files.items() if stage.adapter else ():
                yield f"{stage.adapter.folder}/{name}", f"adapter of stage {stage.name}", entry
