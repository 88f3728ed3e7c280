"""Making a file cold, and knowing whether it is.

A read that finds its pages in memory measures memory. ``evict`` drops them and ``resident_fraction`` asks the kernel
how many are left. On a virtual machine the host may still hold them: such a read is "guest-cold" and no more.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from firsttoken.study.system import kernel_files
from firsttoken.study.system.processor import virtualised

_MS_INVALIDATE = 2  # on Linux and macOS alike
_MAP_FAILED = ctypes.c_void_p(-1).value
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # of what mincore says of a page: whether it is in memory
_COLD = {True: "guest-cold", False: "cold", None: "cold (in a guest or not is not known)"}


def evict(path: Path) -> str:
    """Drop the pages of ``path`` from the page cache; returns how, and whether that was verified.

    ``posix_fadvise`` touches this file only, so it goes first, or where there is none, as on macOS, ``msync``; as root,
    ``drop_caches`` follows unless no page is left. Dirty pages cannot be dropped, so the file is synchronised before.
    """
    handle = os.open(path, os.O_RDONLY)
    used = []
    try:
        with contextlib.suppress(OSError):  # some file systems synchronise nothing that is open for reading
            os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            used.append("fadvise")
        elif _invalidate(path):
            used.append("msync")
    finally:
        os.close(handle)
    if resident_fraction(path) != 0 and kernel_files.write(kernel_files.PROC / "sys" / "vm" / "drop_caches", "1"):
        used.append("drop_caches")
    resident = resident_fraction(path)
    verdict = "not verified" if resident is None else f"{resident:.0%} of its pages resident before the read"
    return f"{_COLD[virtualised()]} by {' and '.join(used) or 'no means this system has'}, {verdict}"


def resident_fraction(path: Path) -> float | None:
    """Share of the pages of ``path`` in memory, from mincore(2); None where the system does not tell.

    Linux tells only who may write the file, or owns it: to others it says "in memory" of every page.
    """
    size = os.path.getsize(path)
    if size == 0:
        return 0.0
    mincore = _libc("mincore")
    if mincore is None or not (os.stat(path).st_uid == os.geteuid() or os.access(path, os.W_OK)):
        return None
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with _mapped(path, size) as address:
        if address is None or mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            return None
    return bytes(pages).translate(_LOWEST_BIT).count(1) / len(pages)


def _invalidate(path: Path) -> bool:
    """Have the pages of ``path`` read from the disk again; False where that cannot be asked."""
    msync, size = _libc("msync"), os.path.getsize(path)
    if msync is None or size == 0:
        return False
    with _mapped(path, size) as address:
        return address is not None and not msync(ctypes.c_void_p(address), ctypes.c_size_t(size), _MS_INVALIDATE)


@contextmanager
def _mapped(path: Path, size: int) -> Iterator[int | None]:
    """The address at which all of ``path`` is mapped, no page of it touched; None where it cannot be.

    Python's own mapping tells its address only where it can be written, and a private copy is not the file.
    """
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    handle = os.open(path, os.O_RDONLY)
    try:
        length, offset = ctypes.c_size_t(size), ctypes.c_int64(0)
        address = library.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, handle, offset)
    finally:
        os.close(handle)
    if address == _MAP_FAILED:
        yield None
        return
    try:
        yield address
    finally:
        library.munmap(ctypes.c_void_p(address), length)


def _libc(name: str) -> Callable[..., int] | None:
    """A function of the C library, None where it has no such one."""
    return getattr(ctypes.CDLL(None), name, None)
