"""What macOS tells in place of /proc."""

from __future__ import annotations

import subprocess
import sys


def sysctl(name: str) -> str:
    """The value of a kernel variable of macOS such as "hw.memsize"; "" elsewhere, and where it does not exist."""
    if sys.platform != "darwin":
        return ""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
