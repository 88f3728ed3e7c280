"""An entry as one safetensors file: tokens, then a tensor a piece, with the sha256 of each in the header.

Written here and not by the library, which tells the size of a file only when it is written: a bounded store must make
room before. Any safetensors reader opens the result.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firsttoken.assets.checkpoint import check_shard
from firsttoken.kvreuse.entry import Entry
from firsttoken.kvreuse.identity import ModelIdentity
from firsttoken.kvreuse.tensors import bytes_of
from firsttoken.link import Link
from firsttoken.study.errors import CacheError, LinkError, ModelError
from firsttoken.study.files import replacing

_FORMAT = "firsttoken-kv-1"
_TOKENS = "tokens"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # torch's name: that of safetensors


class Span(NamedTuple):
    """Where a piece lies in its file (bytes from its first), what it is, and the hex sha256 of its bytes."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str


@dataclass(frozen=True)
class KVFile:
    """A file of ``nbytes`` and the pieces of ``entry`` in it."""

    path: Path
    entry: Entry
    spans: Mapping[str, Span]
    nbytes: int


@dataclass(frozen=True)
class Draft:
    """A file before it is written."""

    file: KVFile
    header: bytes
    data: tuple[memoryview, ...]

    def write(self) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        with replacing(self.file.path) as temporary, temporary.open("wb") as opened:
            opened.write(self.header)
            for part in self.data:
                opened.write(part)


def draft(path: Path, entry: Entry, pieces: Mapping[str, Tensor]) -> Draft:
    """The file at ``path`` that would hold ``pieces``. Raises CacheError for a dtype that is not kept."""
    if entry.model.dtype not in _DTYPES:
        raise CacheError(f"a KV cache in {entry.model.dtype} is not kept on disk; only in {', '.join(_DTYPES)}")
    data = {_TOKENS: memoryview(entry.tokens)} | {name: bytes_of(piece) for name, piece in pieces.items()}
    sums = {name: hashlib.sha256(part).hexdigest() for name, part in data.items()}
    metadata = {
        "format": _FORMAT,
        "model": json.dumps(asdict(entry.model)),
        "edges": json.dumps(entry.edges),
        "sha256": json.dumps(sums),
    }
    table: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, part in data.items():
        dtype, shape = ("I64", [entry.length]) if name == _TOKENS else (_DTYPES[entry.model.dtype], pieces[name].shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + part.nbytes]}
        start += part.nbytes
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    header = len(text).to_bytes(8, "little") + text
    file = KVFile(path, entry, _spans(entry, table, sums, len(header)), len(header) + start)
    return Draft(file, header, tuple(data.values()))


def read_header(path: Path) -> KVFile:
    """What the file at ``path`` holds; of its data only the tokens are read. Raises CacheError when it is torn."""
    try:
        check_shard(path)
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            table = json.loads(opened.read(length))
            metadata = table["__metadata__"]
            sums = json.loads(metadata["sha256"])
            tokens = opened.read(table[_TOKENS]["data_offsets"][1])  # they come first
        edges = tuple(json.loads(metadata["edges"]))
        entry = Entry(ModelIdentity(**json.loads(metadata["model"])), tokens, edges)
        spans = _spans(entry, table, sums, 8 + length)
        sound = metadata["format"] == _FORMAT and path.name == file_name(entry.key)
        sound = sound and all(span.nbytes == math.prod(span.shape) * span.dtype.itemsize for span in spans.values())
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{path} is torn or no KV cache; remove it") from error
    if not sound:
        raise CacheError(f"{path} holds another KV cache than its name says; remove it")
    return KVFile(path, entry, spans, path.stat().st_size)


def read_piece(handle: int, span: Span) -> Tensor:
    """One piece, and no byte beside it. Raises CacheError when its bytes are not those that were written."""
    with torch.inference_mode(False):  # it may be kept, and read outside that mode
        piece = torch.empty(span.shape, dtype=span.dtype)
    into = bytes_of(piece)
    try:
        Link().read_into(handle, into, span.offset)
    except LinkError as error:
        raise CacheError(str(error)) from error
    if hashlib.sha256(into).hexdigest() != span.sha256:
        raise CacheError("its sha256 is not that of what was stored")
    return piece


def file_name(key: str) -> str:
    """The name of an entry's file: nothing else in a folder is taken for one."""
    return f"{key}.kv.safetensors"


def _spans(entry: Entry, table: Mapping[str, Any], sums: Mapping[str, str], data_start: int) -> dict[str, Span]:
    """The spans of the pieces that the entry must have; a KeyError names one that is not there."""
    dtype = getattr(torch, entry.model.dtype)
    found = {}
    for name, shape in entry.shapes.items():
        start, end = table[name]["data_offsets"]
        found[name] = Span(data_start + start, end - start, shape, dtype, sums[name])
    return found
