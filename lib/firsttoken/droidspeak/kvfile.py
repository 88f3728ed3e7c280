"""An entry as one safetensors file: tokens, then a tensor a piece, with the sha256 of each in the header.

Written here and not by the library, which tells the size of a file only when it is written: a bounded store must make
room before. Any safetensors reader opens the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from firsttoken.droidspeak.entry import Entry
from firsttoken.droidspeak.identity import ModelIdentity
from firsttoken.droidspeak.tensor_bytes import CachePiece, bytes_of, check_numbers
from firsttoken.link.shaped import Link
from firsttoken.study.errors import CacheError, LinkError
from firsttoken.study.files import replacing
from firsttoken.study.parsing import safetensors_header
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as
from firsttoken.study.parsing.safetensors_header import TensorEntry
from firsttoken.study.parsing.schema import digits, parse_as

_FORMAT = "firsttoken-kv-1"
_TOKENS = "tokens"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # torch's name: that of safetensors


@dataclass(frozen=True)
class _Metadata:
    """The metadata beside the format, each as JSON."""

    model: ModelIdentity
    edges: tuple[int, ...]
    sha256: dict[str, Annotated[str, digits(64)]]


@dataclass(frozen=True)
class KVFile:
    """A file of ``nbytes`` and the pieces of ``entry`` in it.

    ``spans`` are by name: "layer.3" [2, 1, kv_heads, tokens, head_dim], "edge.3" [1, tokens, hidden]. Whoever reads
    them compares each with its sha256, as ``read_piece`` does.
    """

    path: Path
    entry: Entry
    spans: Mapping[str, CachePiece]
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
    """Lay out a file at ``path`` that holds ``pieces``. Raises CacheError for a dtype that is not kept."""
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
    stored, start = {}, 0
    for name, part in data.items():
        dtype, shape = ("I64", [entry.length]) if name == _TOKENS else (_DTYPES[entry.model.dtype], pieces[name].shape)
        stored[name] = TensorEntry(dtype, tuple(shape), start, start + part.nbytes)
        start += part.nbytes
    table = {safetensors_header.METADATA: metadata} | safetensors_header.header_table(stored, 0)
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    header = len(text).to_bytes(8, "little") + text
    placed = {
        name: replace(span, start=span.start + len(header), end=span.end + len(header)) for name, span in stored.items()
    }
    file = KVFile(path, entry, _spans(path, entry, placed, sums), len(header) + start)
    return Draft(file, header, tuple(data.values()))


def read_header(path: Path) -> KVFile:
    """Read what the file at ``path`` holds, and of its data the tokens alone. Raises CacheError when it is torn."""
    with errors_as(path, CacheError, "remove it"):
        header = safetensors_header.read_header(path)
        if header.metadata.pop("format", None) != _FORMAT:
            raise ParseError(f"it is not of the format {_FORMAT}")
        metadata = parse_as(_Metadata, {name: parse_json(text) for name, text in header.metadata.items()})
        # before a name is made for each layer that it says the model has
        if len(header.tensors) != 1 + metadata.model.layers + len(metadata.edges):
            raise ParseError(f"it has {len(header.tensors)} tensors, not one a layer and an edge of its model")
        with path.open("rb") as opened:
            stored = header.tensors[_TOKENS]
            opened.seek(stored.start)
            entry = Entry(metadata.model, opened.read(stored.end - stored.start), metadata.edges)
        if path.name != file_name(entry.key):
            raise ParseError("it holds another KV cache than its name says")
        return KVFile(path, entry, _spans(path, entry, header.tensors, metadata.sha256), path.stat().st_size)


def read_piece(handle: int, span: CachePiece) -> Tensor:
    """Read one piece and no byte beside it.

    Raises CacheError when its bytes are not those that were written, or are no numbers that a layer computes with.
    """
    with torch.inference_mode(False):  # it may be kept, and read outside that mode
        piece = torch.empty(span.shape, dtype=span.dtype)
    into = bytes_of(piece)
    try:
        Link().read_into(handle, into, span.offset)
    except LinkError as error:
        raise CacheError(str(error)) from error
    if hashlib.sha256(into).hexdigest() != span.sha256:
        raise CacheError("its sha256 is not that of what was stored")
    check_numbers(piece)
    return piece


def file_name(key: str) -> str:
    """The name of an entry's file: nothing else in a folder is taken for one."""
    return f"{key}.kv.safetensors"


def _spans(
    path: Path, entry: Entry, stored: Mapping[str, TensorEntry], sums: Mapping[str, str]
) -> dict[str, CachePiece]:
    """The spans of the pieces that the entry must have. Raises ParseError for one of another dtype or shape."""
    dtype = _DTYPES.get(entry.model.dtype)
    wanted = {_TOKENS: ("I64", (entry.length,))} | {name: (dtype, shape) for name, shape in entry.shapes.items()}
    for name, wanted_shape in wanted.items():
        if (stored[name].dtype, stored[name].shape) != wanted_shape:
            raise ParseError(
                f"{name} is {stored[name].dtype} {list(stored[name].shape)}, its model makes {wanted_shape}"
            )
    torch_dtype = getattr(torch, entry.model.dtype)
    spans = {}
    for name, shape in entry.shapes.items():
        spans[name] = CachePiece(name, path, stored[name].start, shape, torch_dtype, sums[name])
    return spans
