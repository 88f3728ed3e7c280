"""What is kept compressed, unpacked within limits: a few bytes may stand for more than a machine has."""

from __future__ import annotations

import gzip
from pathlib import Path

from firsttoken.study.parsing.parse_errors import MOST_BYTES, Damaged, regular_size


def read_gzip(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a gzip file. Raises OSError, EOFError and zlib.error for one that is torn, and Damaged for one of
    more than ``most`` bytes."""
    regular_size(path)
    with gzip.open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Damaged(f"it unpacks to more than {most:,} bytes")
    return content
