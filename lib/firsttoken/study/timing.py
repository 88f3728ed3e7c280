"""Timers for code that may run on an accelerator: the device is synchronised before each reading of the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_RESUMED: ContextVar[list[float] | None] = ContextVar("resumed", default=None)


@contextmanager
def count_resumed() -> Iterator[list[float]]:
    """The seconds that :func:`add_resumed` is told of in the block: a run that was resumed took these as well."""
    seconds: list[float] = []
    token = _RESUMED.set(seconds)
    try:
        yield seconds
    finally:
        _RESUMED.reset(token)


def add_resumed(seconds: float) -> None:
    """Say that something took ``seconds`` in an earlier run, of which it was kept."""
    if (counted := _RESUMED.get()) is not None:
        counted.append(seconds)


def synchronise(device: torch.device | str | None = None) -> None:
    """Wait until a CUDA ``device`` has finished what was queued; does nothing for a CPU or None."""
    if device is None:
        return
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Context manager that measures the seconds spent inside it.

    ``seconds`` is the final time after the block, and the time so far inside it (the device is synchronised then too).
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = device
        self._start = 0.0
        self._stop: float | None = None

    def __enter__(self) -> Stopwatch:
        synchronise(self.device)
        self._stop = None
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        synchronise(self.device)
        self._stop = time.perf_counter()

    @property
    def seconds(self) -> float:
        if self._stop is None:
            synchronise(self.device)
            return time.perf_counter() - self._start
        return self._stop - self._start


def timed(
    fn: Callable[[], Any], *, repeats: int, warmup: int = 1, device: torch.device | str | None = None
) -> list[float]:
    """Seconds of each of ``repeats`` calls of ``fn``, after ``warmup`` calls that are not counted.

    Raises ValueError when ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    for _ in range(warmup):
        fn()
    seconds = []
    for _ in range(repeats):
        with Stopwatch(device) as watch:
            fn()
        seconds.append(watch.seconds)
    return seconds


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within the block torch computes with ``count`` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
