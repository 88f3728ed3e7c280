"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firsttoken.engine.model_server import LoadingServer

TIMEOUT_S = 300.0  # s; nothing here takes one of them, on a quiet machine


def until(holds: Callable[[], object], what: str, within_s: float = TIMEOUT_S) -> None:
    """Wait for it; fails where it has not come ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)


def wait_stage(server: LoadingServer, stage: int, within_s: float) -> bool:
    """Wait until ``server`` serves by ``stage`` or a later one; False where ``within_s`` seconds are over first."""
    with server._change:
        return server._change.wait_for(lambda: server._stage >= stage, within_s)


async def reached(holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for it on an event loop, which goes on meanwhile; raises TimeoutError where it has not come in time."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.002)
