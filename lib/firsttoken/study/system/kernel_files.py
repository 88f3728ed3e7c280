"""What a kernel tells about itself: Linux in files, of which some containers lack some, and macOS by a command."""

import subprocess
import sys
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")


def read(path: Path) -> str:
    """The stripped text of a file of the kernel, "" where it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def write(path: Path, text: str) -> bool:
    """Tell the kernel ``text``; False where it does not listen, or not to this user."""
    try:
        path.write_text(text, encoding="ascii")
    except OSError:
        return False
    return True


def sysctl(name: str) -> str:
    """The value of a kernel variable of macOS such as "hw.memsize"; "" elsewhere, and where it does not exist."""
    if sys.platform != "darwin":
        return ""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
