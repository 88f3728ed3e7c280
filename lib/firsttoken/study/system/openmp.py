"""The threads that OpenMP keeps for every thread that has run a parallel loop (standard library only).

With more of them in a process than it has processors, libgomp lets none spin between two loops, and each loop waits
until its threads have been woken. An engine in a thread of its own said 93 tokens/s where the main thread had computed
before it, and 138 once that had given its threads back (16 requests of 135 M, two cores).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_HARD = 2  # omp_pause_hard: what is kept is freed, and made again by the next loop
_orphan: int | None = None  # the thread that came out of a fork; those that it kept, if any, are not there any more
_alone = False  # before the fork: no thread but that one, so that it kept none


def _before_fork() -> None:
    global _alone
    try:
        _alone = len(os.listdir("/proc/self/task")) == 1
    except OSError:
        _alone = False


def _in_child() -> None:
    global _orphan
    _orphan = threading.get_ident() if _orphan is not None or not _alone else None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def give_back_threads() -> None:
    """Let go of those of the calling thread, outside of any loop; nothing where there is no OpenMP, or no such call.

    LLVM's OpenMP would end the loops of all threads, and is left alone. So is a thread that came out of a fork without
    those it had kept: libgomp would wait for them without end.
    """
    if threading.get_ident() == _orphan:
        return
    with suppress(AttributeError, TypeError):
        library = ctypes.CDLL(None)
        if not hasattr(library, "__kmpc_fork_call"):
            library.omp_pause_resource_all(_HARD)


def loops_on_one_core() -> None:
    """Loops of the calling thread need no others from now on, and keep none.

    ``torch.set_num_threads`` would hold for threads to come as well. MKL has a number of its own, which stays.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].get_num_threads()  # it tells a thread's first loop what that said, over what is said here
    give_back_threads()
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


@contextmanager
def loops_elsewhere() -> Iterator[None]:
    """As :func:`loops_on_one_core` for the time of the block, for a thread that hands what is large to others."""
    library, before = ctypes.CDLL(None), 0
    with suppress(AttributeError, TypeError):
        before = library.omp_get_max_threads()
    loops_on_one_core()
    try:
        yield
    finally:
        if before:
            library.omp_set_num_threads(before)
