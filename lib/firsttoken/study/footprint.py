"""What a process takes: resident memory in bytes, now and at its peak, and CPU seconds (standard library only)."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

_PROC = Path("/proc/self")


def resident() -> int:
    """Resident bytes now, mapped file pages included; the peak where the system tells no more."""
    return _status("VmRSS")


def peak() -> int:
    """The most resident bytes since the last :func:`reset_peak`, or since the process began."""
    return _status("VmHWM")


def reset_peak() -> int:
    """Forget the former peak, where the kernel can (Linux), and return what is resident now."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5", encoding="ascii")
    return resident()


def cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status(key: str) -> int:
    try:
        lines = (_PROC / "status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
