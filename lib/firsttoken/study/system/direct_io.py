"""Reading parts of an open file, through the page cache or past it, into memory that has its pages, with what the
system has for that."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
from pathlib import Path

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise, Linux 5.14


def read_at(handle: int, buffer: memoryview, offset: int) -> int:
    """Read from byte ``offset`` of the open file ``handle`` into ``buffer``; the bytes read, 0 at the end of the file.

    Fewer than asked for is no error. Raises OSError.
    """
    if hasattr(os, "preadv"):
        return os.preadv(handle, [buffer], offset)
    data = os.pread(handle, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


def open_uncached(path: Path) -> int | None:
    """``path`` open for reads that leave the page cache alone; None where its file system has no such reads.

    On Linux offsets, lengths and addresses must then be multiples of the disk's block; macOS takes any. Raises OSError
    for a file that cannot be opened in any way.
    """
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # tmpfs, for one
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
    elif hasattr(fcntl, "F_NOCACHE"):
        handle = os.open(path, os.O_RDONLY)
        fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
        return handle
    return None


def is_cached(handle: int) -> bool | None:
    """Return whether the first page of an open file is in the page cache; None where the system does not tell."""
    try:
        return os.preadv(handle, [bytearray(1)], 0, os.RWF_NOWAIT) >= 0
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return None


def read_ahead(path: Path) -> None:
    """Bring a file into the page cache, in one call in which other threads run. A system without that call is asked to,
    and may bring a part. Raises OSError for a file that cannot be opened.

    Linux answers POSIX_FADV_WILLNEED with what one request to the disk may hold, here 8 MB; and to read here would take
    the interpreter from other threads for each chunk.
    """
    with path.open("rb") as file:
        if sys.platform == "linux" and os.fstat(file.fileno()).st_size:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            memory.madvise(mmap.MADV_SEQUENTIAL)
            if _advised(memory, len(memory), _POPULATE_READ):
                return
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read_no_further(handle: int) -> None:
    """Ask the system not to read ahead in an open file; it may not know how to."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)


def back(memory: memoryview) -> None:
    """Have the system give pages to all of fresh ``memory`` before anybody writes to it; what it holds stays. Other
    threads run meanwhile.

    A page that is written before costs its writer a fault: on a virtual machine 0.5 s of 540 MB, beside 0.1 s of
    writing. Where the system has no such call nothing is done.
    """
    if sys.platform == "linux" and memory:
        _advised(memory, memory.nbytes, _POPULATE_WRITE)


def _advised(memory: memoryview | mmap.mmap, size: int, advice: int) -> bool:
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0
