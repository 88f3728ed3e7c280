"""A task that others may end with an error of theirs: what it awaits is cancelled, and it raises what they say."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Ending:
    """The task that is in the block; ``end`` makes the block raise. To be used once, as a context manager."""

    def __init__(self) -> None:
        self.why: Exception | None = None
        self._task: asyncio.Task | None = None

    def end(self, why: Exception) -> None:
        """Raise ``why`` in the block, from another task; the first to say so is heard."""
        if self.why is None and self._task is not None:
            self.why = why
            self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self.why is not None and isinstance(error, asyncio.CancelledError):
            task.uncancel()
            raise self.why from None
