"""Schedulers that know what each request is promised: Niyama's classes of service (Goel et al., arXiv 2503.22562)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from firsttoken.engine.request import Request
from firsttoken.engine.schedulers.deadline import Deadline
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.work import Work


def earliest_due(first_s: Sequence[float]) -> type[Sarathi]:
    """Sarathi with its budget as it is; of the waiting prompts the one whose first token is due first begins first.

    The first token of request ``number`` is due ``first_s[number]`` seconds after its arrival. Where all are promised
    the same this is first come, first served.
    """

    class EarliestDue(Sarathi):
        name: ClassVar[str] = "earliest_due"

        def budget(self, decodes: Sequence[Work]) -> int:
            self.arrange(lambda request: (request.arrival_s + first_s[request.number], request.number))
            return self.bounds.token_budget

    return EarliestDue


def own_deadline(first_s: Sequence[float]) -> type[Deadline]:
    """``Deadline`` with a promise for each request, as in ``earliest_due``. Of Niyama's three parts it has two, chunks
    by slack and prompts by deadline; nobody is put aside who is too late."""

    class OwnDeadline(Deadline):
        name: ClassVar[str] = "own_deadline"

        def first_s(self, request: Request) -> float:
            return first_s[request.number]

    return OwnDeadline


OWN_OBJECTIVES: dict[str, Callable[[Sequence[float]], type[Sarathi]]] = {
    "earliest_due": earliest_due,
    "deadline": own_deadline,
}
"""How such a scheduler is made, by the name that a profile has for it."""
