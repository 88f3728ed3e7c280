"""The files in which Linux tells about itself; other systems, and some containers, lack all or some of them."""

from __future__ import annotations

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
