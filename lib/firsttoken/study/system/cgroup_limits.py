"""What this process may use of the machine: cores and main memory, cut by a container's limits; and which cores."""

import math
import os
import re
from collections.abc import Collection

from firsttoken.study.system import kernel_files


def cores() -> int:
    """Cores this process may use: its affinity, or all where the system knows none, cut by a container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _limit("cpu.max").partition(" ")
    return min(usable, math.ceil(int(quota) / int(period))) if quota.isdigit() and period.isdigit() else usable


def stay_on(these: Collection[int]) -> None:
    """Let this thread, and those that it starts, run on ``these`` only; on all where none is named, and where the
    system knows no such thing."""
    if these and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, these)


def halves_of_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The processors that this process may use, as two machines would share them; none named where there is but one,
    or the system does not tell."""
    own_processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(own_processors) // 2
    return (tuple(own_processors[:half]), tuple(own_processors[half : 2 * half])) if half else ((), ())


def memory_bytes() -> int | None:
    """Main memory, or a container's limit where that is lower; None where the system does not tell."""
    limit = _limit("memory.max")
    limits = [total for total in (_total_memory(), int(limit) if limit.isdigit() else None) if total]
    return min(limits, default=None)


def free_memory_bytes() -> int | None:
    """Main memory that nobody uses or that can be had at once, and no more than :func:`memory_bytes`; None where the
    system does not tell."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", kernel_files.read(kernel_files.PROC / "meminfo"), re.MULTILINE)
    limits = [total for total in (memory_bytes(), int(match[1]) << 10 if match else None) if total]
    return min(limits, default=None)


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no sysconf, a name that it does not know, a value it does not have
        total = kernel_files.sysctl("hw.memsize")
        return int(total) if total.isdigit() else None


def _limit(name: str) -> str:
    return kernel_files.read(kernel_files.SYS / "fs" / "cgroup" / name)
