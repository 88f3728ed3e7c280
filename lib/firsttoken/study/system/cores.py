"""Which processors a process may use."""

from __future__ import annotations

import os
from collections.abc import Collection


def stay_on(cores: Collection[int]) -> None:
    """Let this thread, and those that it starts, run on ``cores`` only; on all where none is named, and where the
    system knows no such thing."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def two_halves() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The processors that this process may use, as two machines would share them; none named where there is but one,
    or the system does not tell."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(mine) // 2
    return (tuple(mine[:half]), tuple(mine[half : 2 * half])) if half else ((), ())
