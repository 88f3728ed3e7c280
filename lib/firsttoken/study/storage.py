"""A disk that is full or cannot be written, in one line with the mend."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from firsttoken.study import paths
from firsttoken.study.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Raises StorageError where the block meets a disk that is full or closed to this user; ``folder`` is blamed when
    the error does not name a file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if (message := refusal(error, folder)) is None:
            raise
        raise StorageError(message) from error


def refusal(error: Exception, folder: Path) -> str | None:
    """The line for an error of the disk, None for any other error."""
    named = getattr(error, "filename", None)
    path = Path(named) if isinstance(named, str) else folder
    if getattr(error, "errno", None) in _FULL or is_full(str(error)):
        return f"the disk of {path} is full: free some of it, or {_elsewhere(path)} on a larger disk"
    if getattr(error, "errno", None) in _CLOSED and path is not folder:
        return f"{path}: {error.strerror}: let this user write there, or {_elsewhere(path)} that can be written"
    return None


def is_full(text: str) -> bool:
    """Return whether a message of a program, such as safetensors' or papermill's, complains of a full disk."""
    return any(os.strerror(number) in text for number in _FULL)


def check(folder: Path) -> None:
    """Make sure, before hours of work, that files can be put into ``folder``. Raises StorageError."""
    with storing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"\0")
        except OSError as error:
            error.filename = str(folder)  # which can be mended, unlike the temporary file's name
            raise


def _elsewhere(path: Path) -> str:
    variable = "FIRSTTOKEN_CACHE" if path.is_relative_to(paths.CACHE) else "FIRSTTOKEN_OUT"
    return f"set {variable} to a folder"
