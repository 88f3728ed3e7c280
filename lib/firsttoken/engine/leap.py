"""Steps that are alike, taken at once: as long as all who run decode and nobody comes or ends, a simulation only adds
up times. The outcome is that of one step after the other (``tests/engine/test_leap.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.engine.simulated import TOKEN, SimulatedExecutor
from firsttoken.engine.trace import Step
from firsttoken.engine.work import Kind, Work

if TYPE_CHECKING:
    from firsttoken.engine.engine import Engine
    from firsttoken.engine.request import Request
    from firsttoken.engine.schedulers.base import Scheduler


def leap(engine: Engine, next_arrival_s: float) -> None:
    """Take the coming steps of ``engine`` up to the one in which a request ends, or that begins after the next arrival.

    To be called after a step that decoded all who run. It does nothing where steps may differ: on a device, under a
    scheduler that is not ``steady``, while anybody waits or is away, and where blocks are shared.
    """
    scheduler, executor = engine.scheduler, engine.executor
    away = scheduler.waiting or scheduler.swapped or scheduler.restoring
    if not isinstance(executor, SimulatedExecutor) or not scheduler.steady or away or scheduler.prefixes is not None:
        return
    running = sorted(scheduler.running, key=lambda request: request.order)
    most = _that_fit(scheduler, min((one.sampling.max_tokens - len(one.times_s) for one in running), default=0) - 1)
    if most < 2:
        return
    cached = tuple(request.cached for request in running)
    contexts, now, times = cached, executor.now(), []
    while len(times) < most and now < next_arrival_s:
        start, now = now, executor.charge((), contexts)
        times.append(now)
        scheduler.completed((), contexts, now - start)
        following = tuple([tokens + 1 for tokens in contexts])
        if engine.trace is not None:
            works = tuple(map(Work, running, contexts, following, contexts))
            engine.trace.steps.append(Step(start, now - start, (), contexts, works))
        contexts = following
    for request in running:
        if missing := _missing(scheduler, request, len(times)):
            request.blocks += scheduler.pool.take(missing)
        request.tokens += [TOKEN] * len(times)
        request.times_s += times
        request.advance(request.cached + len(times))
    if times:
        engine.books[Kind.DECODE] += len(times) * len(running)


def _missing(scheduler: Scheduler, request: Request, steps: int) -> int:
    """Blocks for so many tokens more."""
    return max(0, -(-(request.cached + steps) // scheduler.block_tokens) - len(request.blocks))


def _that_fit(scheduler: Scheduler, steps: int) -> int:
    """So many of ``steps``, by halves, that the blocks which are free are enough: nobody is preempted in them."""
    while steps > 1 and sum(_missing(scheduler, request, steps) for request in scheduler.running) > scheduler.pool.free:
        steps //= 2
    return steps
