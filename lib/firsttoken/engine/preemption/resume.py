"""Resume orders: which preempted request comes back first, and whether others may go ahead of one that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from firsttoken.engine.request import Request
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.policy_file import PolicyKind


@dataclass(frozen=True)
class ResumeOrder:
    """``may_pass`` says, by the seconds that a preempted request has waited for its next token and the most that it
    may, whether others may go ahead of it while it does not fit. ``turn`` is the sort key, by default the arrival."""

    may_pass: Callable[[float, float], bool]
    turn: Callable[[Request], Any] = attrgetter("order")


IN_ORDER, AGED = "in_order", "aged"
RESUME_ORDERS: dict[str, ResumeOrder] = {
    IN_ORDER: ResumeOrder(lambda waited_s, most_s: False),  # vLLM 0.2
    "any_that_fits": ResumeOrder(lambda waited_s, most_s: True),
    "shortest_first": ResumeOrder(lambda waited_s, most_s: True, lambda request: (len(request.tokens), request.order)),
    AGED: ResumeOrder(lambda waited_s, most_s: waited_s < most_s),
}


RESUME = PolicyKind(
    "resume order",
    None,
    "write one function of a preempted request that returns a number; the request with the least comes back first",
    {"": lambda turn, *_: "" if isinstance(turn, (int, float)) else f"a turn must be a number, not {turn!r:.60}"},
)


def resume_order_named(name: str | ResumeOrder) -> ResumeOrder:
    """Return the resume order of that name, or one's own. Raises ProfileError for a name that is unknown."""
    if isinstance(name, ResumeOrder):
        return name
    if name not in RESUME_ORDERS:
        raise ProfileError(f"engine: no resume order {name!r}; {unknown(name, RESUME_ORDERS)}")
    return RESUME_ORDERS[name]
