"""The best that anybody could do on a small load who knew all of it: who gives way, how it comes back, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.preemption import Action, PreemptionPolicy
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.schedulers.sarathi import PrefillFirst
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item
from firsttoken_studies.nb22_cross_point_scheduler.study import HOST_BLOCKS

Objective = Callable[[Sequence[Request], float, float], float]
"""The requests of a run, the time in s, the seconds of the shortest step -> the least that the run can end with."""


def worst_tpot_s(requests: Sequence[Request], now_s: float, step_s: float) -> float:
    """The longest time per output token of any request [s], where each that is open says its others without a wait."""
    worst = 0.0
    for request in requests:
        gaps = request.sampling.max_tokens - 1
        if request.times_s and gaps:
            left = 1 + gaps - len(request.times_s)
            end_s = max(now_s, request.times_s[-1]) + left * step_s if left else request.times_s[-1]
            worst = max(worst, (end_s - request.times_s[0]) / gaps)
    return worst


def mean_end_s(requests: Sequence[Request], now_s: float, step_s: float) -> float:
    """The mean end of the requests [s], where each that is open says its tokens without a wait."""
    ends = (
        (
            request.times_s[-1]
            if request.finished
            else now_s + (request.sampling.max_tokens - len(request.times_s)) * step_s
        )
        for request in requests
    )
    return sum(ends) / len(requests)


class Undecided(Exception):
    """Raised where the script of a run has no choice left; ``count`` are possible."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class Script:
    """The choices of one run, in the order in which it asks; ``recent`` are those of the moment at which it asks."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices, self.recent = choices, ()
        self._asked, self._moment_s = 0, -1.0

    def choose(self, count: int, now_s: float) -> int:
        """Return the next choice among ``count`` at ``now_s``. Raises Undecided behind the last."""
        if now_s != self._moment_s:
            self.recent, self._moment_s = (), now_s
        if count == 1:
            return 0
        if self._asked == len(self.choices):
            raise Undecided(count)
        self._asked += 1
        self.recent += (self.choices[self._asked - 1],)
        return self.recent[-1]


class Scripted(PreemptionPolicy):
    """Comes back as the script says."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self.script = script

    def choose(self, tokens: int, now_s: float) -> Action:
        return (Action.SWAP, Action.RECOMPUTE)[self.script.choose(2, now_s)]


def numbers(requests: Sequence[Request]) -> tuple[int, ...]:
    """The numbers of ``requests``, and an end."""
    return *(request.number for request in requests), -1


class ResumesAsScripted(PrefillFirst):
    """Lets preempted requests come back when and in which order the script says.

    It is asked anew when somebody has ended, come or given way: in which order those that compute again come, and
    which swapped one that fits comes back, or, while others run, none.
    """

    name = "resumes_as_scripted"
    script: Script
    asked: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()

    def plan(self) -> list[ScheduledChunk]:
        again = sorted((request for request in self.waiting if request.preemptions), key=lambda request: request.order)
        if (state := (self.preempted, *numbers(again), *numbers(self.running))) != self.asked and again:
            self.asked = state
            turns = {}
            while again:
                turns[again.pop(self._choose(len(again))).number] = len(turns)
            self.sort_waiting(lambda request: turns.get(request.number, len(turns)))
        return super().plan()

    def resume(self) -> None:
        while fitting := [request for request in self.swapped if self._fits(request)]:
            fitting.sort(key=lambda request: request.order)
            if (state := (self.preempted, *numbers(fitting), *numbers(self.running))) == self.passed:
                return
            if (chosen := self._choose(len(fitting) + bool(self.running))) == len(fitting):
                self.passed = state
                return
            self.bring_back(fitting[chosen])

    def _choose(self, count: int) -> int:
        return self.script.choose(count, self.preemptor.executor.now())

    def _fits(self, request: Request) -> bool:
        return self._missing(request, request.cached + 1) <= self.pool.free and self.full < self.config.requests


def least(items: Sequence[Item], costs: Costs, blocks: int, objective: Objective, best: float, runs: int) -> float:
    """The least of ``objective`` over every choice of who gives way, of swap or recompute, and of when and in which
    order requests come back, under prefill-first scheduling: exact by branch and bound, depth first, from ``best``,
    which some rule reached.

    Each run begins anew and follows a script of choices to its end. Requests that compute again go before all that
    never ran, as in vLLM. Raises RuntimeError after ``runs`` runs, which are not all.
    """
    step_s = costs.step_s((), (1,))
    scripts: list[tuple[int, ...]] = [()]
    seen: dict[tuple[object, ...], float] = {}
    for _ in range(runs):
        if not scripts:
            return best
        choices = scripts.pop()
        script = Script(choices)
        executor = SimulatedExecutor(costs, blocks, host_blocks=HOST_BLOCKS)

        def victim(running: list[Request], script: Script = script, now: Callable[[], float] = executor.now) -> Request:
            return sorted(running, key=lambda request: request.order)[script.choose(len(running), now())]

        config = EngineConfig(
            scheduler=type("Resumes", (ResumesAsScripted,), {"script": script}),
            victim=victim,
            watermark=0.0,
            prefill_tokens=2560,
            token_budget=1 << 20,
        )
        engine = Engine(executor, config, policy=Scripted(script))
        requests = [engine.submit(item.prompt, Sampling(item.output_tokens), item.arrival_s) for item in items]
        try:
            engine.run()
        except Undecided as undecided:
            bound = objective(requests, engine.executor.now(), step_s)
            state = script.recent, *_state(engine.scheduler, requests)
            if bound < best - 1e-12 and engine.executor.now() < seen.get(state, math.inf):
                seen[state] = engine.executor.now()
                scripts += [(*choices, choice) for choice in reversed(range(undecided.count))]
        else:
            best = min(best, objective(requests, engine.executor.now(), step_s))
    raise RuntimeError(f"{runs} runs are not all; draw fewer requests, or allow more runs")


def _state(scheduler: ResumesAsScripted, requests: Sequence[Request]) -> tuple[object, ...]:
    """Where each request stands, and what of the past the objectives and the coming questions look at."""
    return (
        *((request.phase, len(request.tokens), *request.times_s[:1], *request.times_s[-1:]) for request in requests),
        *numbers(scheduler.waiting),
        *scheduler.asked,
        *scheduler.passed,
    )
