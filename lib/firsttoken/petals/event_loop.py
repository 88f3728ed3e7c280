"""One event loop in a thread of its own, for all swarms that this process is a client of.

One, as gRPC's asyncio keeps what belongs to a loop beyond its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from firsttoken.study.system.openmp import loops_on_one_core

Answer = TypeVar("Answer")


def begin(coroutine: Coroutine[Any, Any, Answer]) -> Future[Answer]:
    """Schedule the coroutine on the swarm's event loop, and return its future."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def wait_for(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """Return what the coroutine returns on the swarm's event loop, or raise its error. An interrupted wait, as at a
    KeyboardInterrupt, ends the coroutine, too."""
    answer = begin(coroutine)
    try:
        return answer.result()
    except BaseException:
        answer.cancel()  # does nothing where the coroutine has raised
        raise


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.call_soon(loops_on_one_core)  # a prompt's states are large enough for a loop, which the engine would wait for
    threading.Thread(target=loop.run_forever, name="firsttoken-swarm", daemon=True).start()
    return loop
