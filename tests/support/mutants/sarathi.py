"""Wrong versions of what Sarathi-Serve describes."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.schedulers.sarathi import AdaptiveBudget, Sarathi
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.sarathi import capacity as library
from firsttoken.sarathi.capacity import ClientTimes, Objective
from mutants.running import Mutation

Serve = Callable[[float], ClientTimes]
Found = tuple[float, ClientTimes]


def prefill_first() -> None:
    Sarathi.schedule = lambda self: self.prefills(admit=not self.swapped) or self.ready()[0]


def no_budget() -> None:
    Sarathi.budget = lambda self, decodes: 1 << 30


def chunks_and_decodes_in_turns() -> None:
    Sarathi.schedule = lambda self: self.chunks(self.config.token_budget, admit=True) or self.ready()[0]


def nothing_scheduled() -> None:
    Sarathi.schedule = lambda self: []


def no_answer() -> None:
    Sarathi.schedule = lambda self: None


def decodes_outside_the_budget() -> None:
    Sarathi.schedule = lambda self: self.ready()[0] + self.chunks(self.config.token_budget, admit=not self.swapped)


def whole_chunks() -> None:
    """A prompt takes the whole of what is left in a step, however much the budget leaves."""

    def chunks(self: Scheduler, tokens: int, *, admit: bool) -> list[ScheduledChunk]:
        return self.prefills(admit=admit)

    Scheduler.chunks = chunks


def only_doubled() -> None:
    """The search ends at the first rate that broke the objective."""

    def capacity(serve: Serve, objective: Objective, *, start: float, share: float = 0.02) -> Found:
        rate, served = start, serve(start)
        while served.within(objective):
            rate, served = 2 * rate, serve(2 * rate)
        return rate / 2, served

    library.capacity = capacity


def the_rate_that_broke() -> None:
    found = library.capacity
    library.capacity = lambda serve, objective, *, start: (1.02 * found(serve, objective, start=start)[0], None)


def no_bound_on_the_delay() -> None:
    ClientTimes.within = lambda self, objective: self.tbt_p99_s <= objective.tbt_s


def no_bound_on_the_gaps() -> None:
    ClientTimes.within = lambda self, objective: self.delay_p50_s <= objective.delay_s


def no_capacity() -> None:
    library.capacity = lambda serve, objective, *, start: None


def no_objective() -> None:
    AdaptiveBudget.budget = lambda self, decodes: len(decodes) + self.config.prefill_tokens


def learns_nothing() -> None:
    AdaptiveBudget.completed = lambda self, prefills, contexts, seconds: None


SCHEDULER, SEARCH = "Sarathi-Serve's scheduler", "the capacity search"
MUTATIONS: list[Mutation] = [
    Mutation("02", "prefill first", prefill_first, SCHEDULER),
    Mutation("02", "no token budget", no_budget, SCHEDULER),
    Mutation("02", "prompts are never cut", whole_chunks, SCHEDULER),
    Mutation("40", "prefill first", prefill_first, SCHEDULER, quick=True),
    Mutation("40", "no token budget", no_budget, SCHEDULER),
    Mutation("40", "chunks and decodes in turns", chunks_and_decodes_in_turns, SCHEDULER),
    Mutation("40", "nothing is scheduled", nothing_scheduled, SCHEDULER),
    Mutation("40", "no answer", no_answer, SCHEDULER),
    Mutation("40", "decodes outside the budget", decodes_outside_the_budget, SCHEDULER),
    Mutation("40", "prompts are never cut", whole_chunks, SCHEDULER),
    Mutation("41", "prefill first", prefill_first, SCHEDULER),
    Mutation("41", "the search only doubles", only_doubled, SEARCH, quick=True),
    Mutation("41", "the rate that broke", the_rate_that_broke, SEARCH),
    Mutation("41", "no bound on the delay", no_bound_on_the_delay, SEARCH),
    Mutation("41", "no bound on the gaps", no_bound_on_the_gaps, SEARCH),
    Mutation("41", "no capacity", no_capacity, SEARCH),
    Mutation("44", "the objective is not looked at", no_objective, "the adaptive budget"),
    Mutation("44", "nothing is learnt", learns_nothing, "the adaptive budget"),
]
