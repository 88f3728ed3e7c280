"""Files of weights that are read while they are open, and not mapped: whoever overwrites a file that is mapped changes
answers, and whoever cuts it ends the process with SIGBUS. A read is told that the file ends.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from firsttoken.assets.checkpoint import StoredTensor
from firsttoken.study.errors import ModelError
from firsttoken.study.system.direct_io import read_at


class WeightFile:
    """The file ``path``, open for reads by its ``handle`` until nothing refers to it. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle = path, os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)

    def read(self, start: int, room: memoryview) -> None:
        """Fill ``room`` with the bytes from ``start`` on. Raises ModelError where the file ends before, and OSError."""
        read = 0
        while read < len(room):
            came = read_at(self.handle, room[read:], start + read)
            if not came:
                raise self.fault(errno.ENODATA)
            read += came

    def fault(self, number: int) -> Exception:
        """The error of this ``number`` that a read has met; ENODATA stands for the end of the file."""
        if number == errno.ENODATA:
            return ModelError(f"{self.path} was cut while it was read; copy it again")
        return OSError(number, os.strerror(number), str(self.path))


@dataclass(frozen=True)
class FileRows:
    """A weight of this ``shape`` as it is stored in an open file, from the byte ``start`` on."""

    file: WeightFile
    start: int
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]


def opened(paths: Sequence[Path]) -> dict[Path, WeightFile]:
    """The files of these paths. Raises OSError."""
    return {path: WeightFile(path) for path in paths}


def rows_of(stored: StoredTensor, files: dict[Path, WeightFile]) -> FileRows:
    """The tensor ``stored`` in one of the open ``files``."""
    return FileRows(files[stored.file], stored.entry.start, tuple(stored.entry.shape))
