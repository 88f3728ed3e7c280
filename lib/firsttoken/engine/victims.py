"""Who is preempted when a block is missing."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.engine.request import Request
from firsttoken.study.errors import ProfileError
from firsttoken.study.foreign.schema import unknown
from firsttoken.study.policy_file import PolicyKind

Victim = Callable[[list[Request]], Request]

VICTIMS: dict[str, Victim] = {
    "last_arrived": lambda running: max(running, key=lambda request: request.order),  # LIFO, CPS 2.2
    "first_arrived": lambda running: min(running, key=lambda request: request.order),
    "longest": lambda running: max(running, key=lambda request: (request.cached, request.order)),
    "shortest": lambda running: min(running, key=lambda request: (request.cached, request.order)),
}

_NOT_ONE = "a victim must be one of the running requests that it is given"
VICTIM = PolicyKind(
    "victim",
    None,
    "write one function of the running requests that returns one of them, as in firsttoken.engine.victims",
    {"": lambda victim, running: "" if any(victim is one for one in running) else f"{_NOT_ONE}, not {victim!r:.60}"},
)


def victim_named(victim: str | Victim) -> Victim:
    """The choice of that name, or one's own. Raises ProfileError for a name that is unknown."""
    if isinstance(victim, str) and victim not in VICTIMS:
        raise ProfileError(f"engine: no victim choice {victim!r}; {unknown(victim, VICTIMS)}")
    return VICTIMS[victim] if isinstance(victim, str) else victim
