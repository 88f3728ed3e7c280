"""Making a file cold, and knowing whether it is.

A read that finds its pages in memory measures memory. ``evict`` drops them and ``resident_fraction`` asks the kernel
how many are left. On a virtual machine the host may still hold them: such a read is "guest-cold" and no more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from firsttoken.study.machine import virtualised

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def evict(path: Path) -> str:
    """Drop the pages of ``path`` from the page cache; returns how, and whether that was verified.

    ``posix_fadvise`` touches this file only, so it goes first; as root, ``drop_caches`` follows unless no page is
    left. Dirty pages cannot be dropped, so the file is synchronised before.
    """
    handle = os.open(path, os.O_RDONLY)
    used = []
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            used.append("fadvise")
    finally:
        os.close(handle)
    if resident_fraction(path) != 0 and _drop_all():
        used.append("drop_caches")
    left = resident_fraction(path)
    seen = "not verified" if left is None else f"{left:.0%} of its pages resident before the read"
    cold = "guest-cold" if virtualised() else "cold"
    return f"{cold} by {' and '.join(used) or 'no means this system has'}, {seen}"


def resident_fraction(path: Path) -> float | None:
    """Share of the pages of ``path`` in memory, from mincore(2); None where the system cannot tell."""
    size = os.path.getsize(path)
    if size == 0:
        return 0.0
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = view.ctypes.data
        del view  # an exported buffer would keep the mapping from closing
        failed = mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
    return None if failed else float((pages & 1).mean())


def _drop_all() -> bool:
    """Drop the whole page cache; False without the rights for it."""
    try:
        _DROP_CACHES.write_text("1", encoding="utf-8")
    except OSError:
        return False
    return True
