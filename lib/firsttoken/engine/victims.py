"""Who is preempted when a block is missing."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.engine.request import Request

Victim = Callable[[list[Request]], Request]

VICTIMS: dict[str, Victim] = {
    "last_arrived": lambda running: max(running, key=lambda request: request.order),  # LIFO, CPS 2.2
    "first_arrived": lambda running: min(running, key=lambda request: request.order),
    "longest": lambda running: max(running, key=lambda request: (request.cached, request.order)),
    "shortest": lambda running: min(running, key=lambda request: (request.cached, request.order)),
}
