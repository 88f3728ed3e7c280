"""The header of a safetensors file, held against itself and the file's length (standard library only).

Layout (huggingface/safetensors, "Format"): 8 bytes little-endian header length N, N bytes of JSON, then the data;
``data_offsets`` count from the end of the header, and the tensors lie one after another without a gap.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError, regular_size
from firsttoken.study.parsing.schema import at_least, parse_as

SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes of one number, by safetensors' name of its dtype."""

_MOST = 100_000_000  # bytes of a header, safetensors' own limit
_SHORT = 1024  # bytes of a header that is remembered
METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ``dtype`` in safetensors' words ("BF16"), ``start`` and ``end`` in bytes from the file's first."""

    dtype: str
    shape: tuple[Annotated[int, at_least(0)], ...]
    start: Annotated[int, at_least(8)]
    end: Annotated[int, at_least(8)]

    def __post_init__(self) -> None:
        if self.dtype not in SIZES:
            raise ParseError(f"the dtype {self.dtype[:20]!r} is none that is read; known: {', '.join(SIZES)}")
        size = math.prod(self.shape) * SIZES[self.dtype]
        if self.end - self.start != size:
            raise ParseError(
                f"{size:,} bytes by its shape {list(self.shape)}, the range {self.start:,} to {self.end:,}"
            )


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, in the order of their bytes, and its metadata; to be read only."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[Annotated[int, at_least(0)], Annotated[int, at_least(0)]]


def read_header(path: Path) -> Header:
    """Read the header of the file at ``path``. Raises OSError, and ParseError where header and file do not fit."""
    size = regular_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MOST):
            raise ParseError("it is truncated or no safetensors file")
        return _header(file.read(length), size)


def header_of(data: bytes) -> Header:
    """The header of a safetensors file that lies in memory. Raises ParseError as :func:`read_header`."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= min(len(data) - 8, _MOST):
        raise ParseError("it is truncated or no safetensors file")
    text = bytes(data[8 : 8 + length])
    return _known_header(text, len(data)) if length <= _SHORT else _header(text, len(data))


def _header(text: bytes, size: int) -> Header:
    """Read the header from the JSON that follows the length, in a file of ``size`` bytes."""
    table, length = parse_json(text), len(text)
    if not isinstance(table, dict):
        raise ParseError("its header is no mapping")
    metadata = parse_as(dict[str, str], table.pop(METADATA, None) or {}, METADATA)
    # the reference takes no metadata for null, and passes over what else an entry says
    stored = {name: parse_as(_Stored, entry, name, others=True) for name, entry in table.items()}
    entries = {
        name: parse_as(TensorEntry, _spanned(entry, 8 + length), name)
        for name, entry in sorted(stored.items(), key=lambda item: item[1].data_offsets)
    }
    check_tiles(entries, 8 + length, size, "it")
    return Header(entries, metadata)


_known_header = lru_cache(256)(_header)  # all messages of one shape in a stream have one header


def check_tiles(entries: Mapping[str, TensorEntry], start: int, end: int, subject: str) -> None:
    """Raise ParseError unless ``entries`` of ``subject`` fill the bytes from ``start`` to ``end``, each byte once."""
    offset = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != offset:
            raise ParseError(
                f"{name} in {subject}: the range {entry.start:,} to {entry.end:,}, and the one before ends at "
                f"{offset:,}"
            )
        offset = entry.end
    if offset != end:
        raise ParseError(f"{subject} is truncated or altered ({end:,} of {offset:,} bytes)")


def header_table(entries: Mapping[str, TensorEntry], start: int) -> dict[str, dict[str, object]]:
    """Return the header of ``entries`` whose data begin at byte ``start``, as a table for JSON."""
    return {
        name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start - start, entry.end - start],
        }
        for name, entry in entries.items()
    }


def _spanned(stored: _Stored, start: int) -> dict[str, object]:
    low, high = stored.data_offsets
    return {"dtype": stored.dtype, "shape": list(stored.shape), "start": start + low, "end": start + high}
