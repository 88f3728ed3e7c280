"""Weights that are served are those of files that stayed as they were while they were read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from firsttoken.study.errors import ModelError

CHANGED = "the weights in {folder} were changed while they were in use; start again"


def seen(files: Sequence[Path]) -> str:
    """Return a text that changes when any of ``files`` does: sizes, times and places on the disk; "" where one has
    gone."""
    with suppress(OSError):
        states = [file.stat() for file in files]
        return " ".join(f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}" for state in states)
    return ""


@contextmanager
def unchanged(files: Sequence[Path], before: str = "") -> Iterator[None]:
    """Raises ModelError where ``files`` are others at the end of the block than at its beginning, or than ``before``
    says, which :func:`seen` has said of them: also in the place of what the block raises."""
    start = before or seen(files)
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    if seen(files) != start:
        raise ModelError(CHANGED.format(folder=files[0].parent)) from fault
    if fault is not None:
        raise fault
