"""Who gives way when blocks run out, and the order in which the others take their turn."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from firsttoken.engine.request import Request

FIRST_COME = attrgetter("order")
Victim = Callable[[list[Request]], Request]

VICTIMS: dict[str, Victim] = {
    "last_arrived": lambda running: max(running, key=FIRST_COME),  # LIFO, CPS 2.2
    "first_arrived": lambda running: min(running, key=FIRST_COME),
    "longest": lambda running: max(running, key=lambda request: (request.cached, request.order)),
    "shortest": lambda running: min(running, key=lambda request: (request.cached, request.order)),
}
