"""Pages of 2 MB for memory that is filled at once (standard library only)."""

from __future__ import annotations

import mmap
from contextlib import suppress

LARGE = 2 << 20


def ask_for_large_pages(memory: mmap.mmap) -> None:
    """Let the system take ``memory`` in large pages, where it does so for who asks (Linux, "madvise" by default).

    The first touch of each small page is a fault: 135,000 for a model of 540 MB.
    """
    if len(memory) >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
