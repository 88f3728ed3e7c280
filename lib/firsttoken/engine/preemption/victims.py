"""Victim rules: which running request is preempted when no KV block is left.

A rule is a function of the running requests that returns one of them. A class is made anew for each engine, and
remembers what it has seen.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Callable

from firsttoken.engine.request import Request
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.policy_file import PolicyKind

Victim = Callable[[list[Request]], Request]

OFTEN = 3  # preemptions after which llama.cpp's rule spares a request
PAUSE_S = 10.0  # that a preemption is expected to take; chosen among 0, 1, 3, 10 and 30 s on draws of their own


# By arrival and admission.


def last_arrived(running: list[Request]) -> Request:
    """The request that came last: LIFO (CPS 2.2)."""
    return max(running, key=lambda request: request.order)


def first_arrived(running: list[Request]) -> Request:
    """The request that came first, CPS's order turned round."""
    return min(running, key=lambda request: request.order)


def last_admitted(running: list[Request]) -> Request:
    """The request that was admitted, or came back, last: the tail of the running list (vLLM, policy FCFS)."""
    return running[-1]


# By the tokens that a request holds.


def longest(running: list[Request]) -> Request:
    """The request with the most tokens cached: it frees most."""
    return max(running, key=lambda request: (request.cached, request.order))


def shortest(running: list[Request]) -> Request:
    """The request with the fewest tokens cached: the least is lost (least computed first, vLLM's RFC 54644)."""
    return min(running, key=lambda request: (request.cached, request.order))


def last_but_the_longest(running: list[Request]) -> Request:
    """The request that came last, though never the one with the most tokens cached: that one is the dearest to bring
    back."""
    return last_arrived(sorted(running, key=lambda request: (request.cached, request.order))[:-1] or running)


def shortest_but_the_leader(running: list[Request]) -> Request:
    """Never the request with the most tokens; of the others the one with the fewest, and one that was preempted
    ``OFTEN`` times only where nobody else is left (unslothai's fork of llama.cpp, 184 and 186)."""
    others = sorted(running, key=lambda request: (request.cached, request.order))[:-1] or running
    return shortest([request for request in others if request.preemptions < OFTEN] or others)


# By the tokens that it has still to say.


def _to_say(request: Request) -> int:
    """The tokens up to the request's limit. In the replayed workloads every answer is as long as its limit."""
    return request.sampling.max_tokens - len(request.times_s)


def most_remaining(running: list[Request]) -> Request:
    """The request with the most tokens to say, if it says all that it may: shortest remaining time first (vLLM
    36980)."""
    return max(running, key=lambda request: (_to_say(request), request.order))


def least_remaining(running: list[Request]) -> Request:
    """The request with the fewest tokens to say, if it says all that it may: longest remaining time first."""
    return min(running, key=lambda request: (_to_say(request), request.order))


class LeastExpected:
    """The request with the fewest tokens expected still to come: the mean of what is left in longer answers that have
    ended, of requests seen here; where none has, as many again as it has said."""

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}
        self._lengths: list[int] = []  # of ended answers, sorted

    def __call__(self, running: list[Request]) -> Request:
        for request in [request for request in self._open.values() if request.finished]:
            insort(self._lengths, len(self._open.pop(request.number).times_s))
        self._open |= {request.number: request for request in running}
        return min(running, key=lambda request: (self._expected(len(request.times_s)), request.order))

    def _expected(self, generated: int) -> float:
        longer = self._lengths[bisect_right(self._lengths, generated) :]
        return sum(longer) / len(longer) - generated if longer else max(1, generated)


# By a score.


def most_blocks_for_its_work(running: list[Request]) -> Request:
    """The request with the most blocks for its tokens, times the share of its answer that is still to come (vLLM
    56897, where only blocks count that nobody shares)."""

    def score(request: Request) -> tuple[float, tuple[float, int]]:
        share_to_come = _to_say(request) / request.sampling.max_tokens
        return len(request.blocks) / len(request.tokens) * share_to_come, request.order

    return max(running, key=score)


def least_delayed(running: list[Request]) -> Request:
    """The request that would have the least time per token behind it if it now waited ``PAUSE_S``, so that who has said
    many tokens fast pays for the pause, and who was preempted before is spared; first of all one that has said none
    (this project)."""

    def seconds_a_token(request: Request) -> tuple[float, tuple[float, int]]:
        times = request.times_s
        return (times[-1] - times[0] + PAUSE_S) / len(times) if times else 0.0, request.order

    return min(running, key=seconds_a_token)


class Drawn:
    """A request drawn at random: a control."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def __call__(self, running: list[Request]) -> Request:
        return self._random.choice(running)


VICTIMS: dict[str, Victim | type[Victim]] = {
    "last_arrived": last_arrived,
    "first_arrived": first_arrived,
    "last_admitted": last_admitted,
    "longest": longest,
    "shortest": shortest,
    "last_but_the_longest": last_but_the_longest,
    "shortest_but_the_leader": shortest_but_the_leader,
    "most_remaining": most_remaining,
    "least_remaining": least_remaining,
    "most_blocks_for_its_work": most_blocks_for_its_work,
    "least_expected": LeastExpected,
    "least_delayed": least_delayed,
    "random": Drawn,
}

_NOT_RUNNING = "a victim must be one of the running requests that it is given"
VICTIM = PolicyKind(
    "victim",
    None,
    "write one function of the running requests that returns one of them, as in firsttoken.engine.preemption.victims",
    {
        "": lambda victim, running: (
            "" if any(victim is candidate for candidate in running) else f"{_NOT_RUNNING}, not {victim!r:.60}"
        )
    },
)


def victim_named(victim: str | Victim) -> Victim:
    """Return the victim rule of that name, or one's own. Raises ProfileError for a name that is unknown."""
    if not isinstance(victim, str):
        return victim
    if victim not in VICTIMS:
        raise ProfileError(f"engine: no victim choice {victim!r}; {unknown(victim, VICTIMS)}")
    rule = VICTIMS[victim]
    return rule() if isinstance(rule, type) else rule
