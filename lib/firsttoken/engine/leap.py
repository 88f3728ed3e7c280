"""Steps that are alike, taken at once: as long as all who run decode and nobody comes or ends, a simulation only adds
up times. The outcome is that of one step after the other (``tests/engine/test_leap.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.engine.simulated import TOKEN, SimulatedExecutor
from firsttoken.engine.trace import Step
from firsttoken.engine.work import Kind, Work

if TYPE_CHECKING:
    from firsttoken.engine.engine import Engine
    from firsttoken.engine.schedulers.base import Scheduler


def leap(engine: Engine, next_arrival_s: float) -> bool:
    """Take the coming steps of ``engine`` up to the one in which a request ends, or that begins after the next arrival.

    To be called after a step, or a leap, that decoded all who ran; whether it took any. It takes none where steps may
    differ: on a device, under a scheduler that is not ``steady``, while anybody waits or is away, and where blocks are
    shared.
    """
    scheduler, executor = engine.scheduler, engine.executor
    away = scheduler.waiting or scheduler.swapped or scheduler.restoring
    if not isinstance(executor, SimulatedExecutor) or not scheduler.steady or away or scheduler.prefixes is not None:
        return False
    running = sorted(scheduler.running, key=lambda request: request.order)
    most = _that_fit(scheduler, min([one.sampling.max_tokens - len(one.times_s) for one in running], default=0))
    contexts, now, times = tuple([request.cached for request in running]), executor.now(), []
    while len(times) < most and now < next_arrival_s:
        start, now = now, executor.charge((), contexts)
        times.append(now)
        scheduler.completed((), contexts, now - start)
        following = tuple([tokens + 1 for tokens in contexts])
        if engine.trace is not None:
            works = tuple(map(Work, running, contexts, following, contexts))
            engine.trace.steps.append(Step(start, now - start, (), contexts, works))
        contexts = following
    if not times:
        return False
    engine.books[Kind.DECODE] += len(times) * len(running)
    said, size = [TOKEN] * len(times), scheduler.block_tokens
    for request, end in zip(running, contexts, strict=True):
        if end > len(request.blocks) * size:
            request.blocks += scheduler.pool.take(-(-end // size) - len(request.blocks))
        request.tokens += said
        request.times_s += times
        request.advance(end)
    for request in running:
        if len(request.times_s) >= request.sampling.max_tokens:
            engine.end(request)
    return True


def _that_fit(scheduler: Scheduler, steps: int) -> int:
    """So many of ``steps``, by halves, that the blocks which are free are enough: nobody is preempted in them."""
    size, running, free = scheduler.block_tokens, scheduler.running, scheduler.pool.free
    while steps > 0 and len(running) * (steps // size + 1) > free:  # else they are enough wherever blocks end
        if sum([max(0, -(-(one.cached + steps) // size) - len(one.blocks)) for one in running]) <= free:
            break
        steps //= 2
    return steps
