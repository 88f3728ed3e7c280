"""One process at a time does what writes the same files; who comes second says in one line that it waits.

The lock is that of an open file, which the kernel gives back however a process ends, so that nothing is left behind by
one that was killed. env/alone.sh runs this file before the package is installed: it needs the standard library alone.
"""

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DIGITS = 20  # more than a process id has


@contextmanager
def alone(path: Path, subject: str) -> Iterator[None]:
    """No other process is in such a block for the lock file ``path``, which is there for the time of the block.

    Where one is, this waits, and says on stderr that somebody else does ``subject`` ("fetches tiny"). Raises OSError
    where the file cannot be made.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            hold(file.fileno(), subject, os.getpid())
            if not _names(path, file.fileno()):
                continue  # who had the lock before took the file away, and somebody else may have made a new one
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def hold(handle: int, subject: str, process: int) -> None:
    """Lock the open file ``handle`` in the name of ``process``, whose id is written into it for those who wait.

    All who have inherited the open file hold the lock until the last of them closes it. Where the file system has no
    locks nobody waits.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(handle, _DIGITS, 0).decode("ascii", "replace")
        print(f"firsttoken: process {other or 'unknown'} {subject}; this one waits for it", file=sys.stderr, flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        return
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(process).encode(), 0)


def _names(path: Path, handle: int) -> bool:
    """Return whether ``path`` is the open file ``handle``."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell whose reader does not want to wait is not shown where
    hold(int(sys.argv[1]), sys.argv[2], os.getppid())
