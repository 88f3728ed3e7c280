"""Wrong versions of what Sarathi-Serve describes."""

from __future__ import annotations

from firsttoken.engine.schedulers.base import Scheduler
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.work import Work
from mutants.running import Mutation


def prefill_first() -> None:
    Sarathi.schedule = lambda self: self.prefills(admit=not self.swapped) or self.ready()[0]


def no_budget() -> None:
    Sarathi.budget = lambda self, decodes: 1 << 30


def chunks_and_decodes_in_turns() -> None:
    Sarathi.schedule = lambda self: self.chunks(self.bounds.token_budget, admit=True) or self.ready()[0]


def nothing_scheduled() -> None:
    Sarathi.schedule = lambda self: []


def no_answer() -> None:
    Sarathi.schedule = lambda self: None


def decodes_outside_the_budget() -> None:
    Sarathi.schedule = lambda self: self.ready()[0] + self.chunks(self.bounds.token_budget, admit=not self.swapped)


def whole_chunks() -> None:
    """A prompt takes the whole of what is left in a step, however much the budget leaves."""

    def chunks(self: Scheduler, tokens: int, *, admit: bool) -> list[Work]:
        return self.prefills(admit=admit)

    Scheduler.chunks = chunks


SCHEDULER = "Sarathi-Serve's scheduler"
MUTATIONS: list[Mutation] = [
    Mutation("40", "prefill first", prefill_first, SCHEDULER, quick=True),
    Mutation("40", "no token budget", no_budget, SCHEDULER),
    Mutation("40", "chunks and decodes in turns", chunks_and_decodes_in_turns, SCHEDULER),
    Mutation("40", "nothing is scheduled", nothing_scheduled, SCHEDULER),
    Mutation("40", "no answer", no_answer, SCHEDULER),
    Mutation("40", "decodes outside the budget", decodes_outside_the_budget, SCHEDULER),
    Mutation("40", "prompts are never cut", whole_chunks, SCHEDULER),
]
