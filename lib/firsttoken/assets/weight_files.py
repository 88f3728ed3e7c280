"""Files of weights that are read while they are open, and not mapped: whoever overwrites a file that is mapped changes
answers, and whoever cuts it ends the process with SIGBUS. Files that were changed while they were read are not served.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from firsttoken.study.errors import ModelError
from firsttoken.study.system.direct_io import read_at

CHANGED = "the weights in {folder} were changed while they were in use; start again"


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


def file_states(files: Sequence[Path]) -> str:
    """Return a text that changes when any of ``files`` does: sizes, times and places on the disk; "" where one has
    gone."""
    with suppress(OSError):
        states = [file.stat() for file in files]
        return " ".join(f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}" for state in states)
    return ""


@contextmanager
def unchanged(files: Sequence[Path], before: str = "") -> Iterator[None]:
    """Raises ModelError where ``files`` are others at the end of the block than at its beginning, or than ``before``
    says, which :func:`file_states` has returned for them: also in the place of what the block raises."""
    start = before or file_states(files)
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    if file_states(files) != start:
        raise ModelError(CHANGED.format(folder=files[0].parent)) from fault
    if fault is not None:
        raise fault
