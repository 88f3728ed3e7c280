"""Memory that the system has given pages before anybody writes to it."""

from __future__ import annotations

import ctypes
import sys

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def back(memory: memoryview) -> None:
    """Have every page of fresh ``memory`` in place; what it holds stays. Other threads run meanwhile.

    A page that is written before costs its writer a fault: on a virtual machine 0.5 s of 540 MB, beside 0.1 s of
    writing. Where the system has no such call nothing is done.
    """
    if sys.platform != "linux" or not memory:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(memory.nbytes), _POPULATE_WRITE)
