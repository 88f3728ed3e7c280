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


def begin(what: Coroutine[Any, Any, Answer]) -> Future[Answer]:
    """Let the coroutine run there."""
    return asyncio.run_coroutine_threadsafe(what, _loop())


def wait_for(what: Coroutine[Any, Any, Answer]) -> Answer:
    """What the coroutine returns or raises there. Who stops waiting, as at a KeyboardInterrupt, ends it, too."""
    answer = begin(what)
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
