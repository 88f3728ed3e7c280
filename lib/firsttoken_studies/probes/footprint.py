"""What a process takes: resident memory in bytes, now and at its peak, and CPU seconds."""

import os
import re
import resource
import subprocess
import sys

from firsttoken.study.system import kernel_files


def resident() -> int | None:
    """Resident bytes now, mapped file pages included; None where the system does not tell."""
    kibibytes = _status("VmRSS")
    return _resident_by_ps() if kibibytes is None else kibibytes


def peak() -> int:
    """The most resident bytes since :func:`reset_peak`, or since the process began where the kernel keeps that."""
    kibibytes = _status("VmHWM")
    return _peak_by_rusage() if kibibytes is None else kibibytes


def reset_peak() -> bool:
    """Forget the former peak; False where the system cannot (Linux alone can)."""
    return kernel_files.write(kernel_files.PROC / "self" / "clear_refs", "5") and _status("VmHWM") is not None


class MemoryGrowth:
    """Measures how much the process grows at its peak, from the moment this is made."""

    def __init__(self) -> None:
        self._forgotten = reset_peak()
        self.before = resident()
        self._peak_before = peak()

    def bytes(self) -> int | None:
        """Return the resident bytes at the peak since the beginning, less those at the beginning; None where the system
        does not tell.

        Where a former peak cannot be forgotten, the growth is known only once the process has grown beyond that peak.
        """
        now = peak()
        if self.before is None or not (self._forgotten or now > self._peak_before):
            return None
        return max(0, now - self.before)


def cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status(key: str) -> int | None:
    """A field of Linux' status of this process in bytes; None where there is no such file or field."""
    text = kernel_files.read(kernel_files.PROC / "self" / "status")
    match = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(match.group(1)) if match else None


def _peak_by_rusage() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # macOS counts in bytes, Linux and the BSDs in KiB


def _resident_by_ps() -> int | None:
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return 1024 * int(output) if output.isdigit() else None
