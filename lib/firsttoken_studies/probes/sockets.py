"""Folders for sockets: short enough for their paths, and entered by this user alone (standard library only)."""

import errno
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from firsttoken.study.errors import StorageError

MOST_PATH = 100  # bytes; the kernel takes 107 on Linux and 103 on macOS
_NAME = 20  # bytes of a socket's name in its folder, with the slash
_PREFIX = "firsttoken-"
_OLD_S = 60.0  # a younger one may be of a process that does not listen yet
_ROOM = len(_PREFIX) + 8 + _NAME  # what mkdtemp adds, and the socket


def socket_folder() -> Path:
    """Make a new folder that only this user may enter, in which a socket of up to 19 bytes can be made. The folder lies
    in the temporary folder where that is short enough, else in the system's.

    Raises StorageError, which names TMPDIR, where no folder is short enough and can be written.
    """
    places = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp", "/dev/shm"]
    for parent in places:
        if parent and len(os.fsencode(os.path.abspath(parent))) + 1 + _ROOM <= MOST_PATH:
            with suppress(OSError):
                _sweep(Path(parent))
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=os.path.abspath(parent)))
    raise StorageError(f"no folder is short enough for a socket ({places[0]} is too long); set TMPDIR to a shorter one")


def _sweep(parent: Path) -> None:
    """Remove what killed processes of this user have left: folders with a socket that nobody hears."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = folder.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_S and _is_left(folder):
                remove_folder(folder)


def _is_left(folder: Path) -> bool:
    heard = [path for path in folder.iterdir() if path.is_socket()]
    for path in heard:
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(str(path)) != errno.ECONNREFUSED:
                return False
    return bool(heard)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` and its content, where it is still there."""
    shutil.rmtree(folder, ignore_errors=True)
