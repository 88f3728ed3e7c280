"""Random ways to share an engine's pool, and a run of one whose every answer is held to the known one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from listening import Listening

from firsttoken.cps.policies import make_policy
from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.preemption import Action, PreemptionPolicy
from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.engine.request import Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.swap import PATHS

BOTH_ENDS = "both ends"
LONGEST = 16  # tokens of an answer in a schedule: what shows then shows in eight more as well, for half as much again


@dataclass(frozen=True)
class Asked:
    """A known prompt by number, how far its answer may go (``stop``: the place of a token that ends it), and when."""

    number: int
    max_tokens: int
    stop: int | None
    after_ms: float


@dataclass(frozen=True)
class Schedule:
    """A way to share the pool: ``spare`` blocks beyond what the longest request needs."""

    asked: list[Asked]
    block_tokens: int
    spare: int
    host_blocks: int
    swap: str
    policy: tuple[str, float | None]
    config: EngineConfig
    write_through: bool


def draw_schedule(seed: int, numbers: int, arrivals: bool) -> Schedule:
    """By ``seed`` alone, so that a run has what the one before it had."""
    rng = random.Random(seed)
    asked = [
        Asked(
            number=rng.randrange(numbers),
            max_tokens=rng.randint(*rng.choice(((1, 4), (6, LONGEST), (12, LONGEST)))),
            stop=rng.randrange(LONGEST) if rng.random() < 0.2 else None,
            after_ms=rng.uniform(0, 8) if arrivals else 0.0,
        )
        for _ in range(rng.choice((1, 2, 4, 5, 6, 7, 8, 8)))
    ]
    name = rng.choice(("swap", "recompute", "cross_point", "online", BOTH_ENDS))
    config = EngineConfig(
        scheduler=rng.choice((*SCHEDULERS, "iteration_level", *["prefill_first"] * 4)),
        victim=rng.choice(sorted(VICTIMS)),
        watermark=rng.choice((0.0, 0.0, rng.uniform(0, 0.5))),
        requests=rng.choice((256, 256, rng.randint(1, 8))),
        prefill_tokens=rng.choice((2048, 2048, rng.randint(1, 100))),
        resume=rng.choice(("in_order", "in_order", "any_that_fits", "shortest_first")),
        share_prefixes=rng.random() < 0.4,
    )
    return Schedule(
        asked=asked,
        block_tokens=rng.choice((rng.randint(1, 5), rng.randint(1, 16))),
        spare=rng.choice((0, rng.randint(0, 8), rng.randint(0, 8), rng.randint(0, 60))),
        host_blocks=rng.choice((0, 0, rng.randint(1, 10), 500, 500)),
        swap=rng.choice(sorted(PATHS)),
        policy=(name, rng.uniform(0, 50) if name == "cross_point" else None),
        config=config,
        write_through=rng.random() < 0.3,
    )


def perform(lab, subject, schedule: Schedule, **options: Any) -> Counter:
    """Run ``schedule``, hold every answer to the known one, and count what happened on the way.

    ``options`` are those of ``Lab.live``.
    """
    known = [subject.known[asked.number] for asked in schedule.asked]
    samplings = [
        Sampling(asked.max_tokens, stop=() if asked.stop is None else (one.answer[asked.stop],))
        for asked, one in zip(schedule.asked, known, strict=True)
    ]
    sizes = [(len(one.prompt), sampling.max_tokens) for one, sampling in zip(known, samplings, strict=True)]
    name, threshold = schedule.policy
    if name == BOTH_ENDS:
        policy: PreemptionPolicy = Listening(lambda tokens: Action.BOTH_ENDS)
    else:
        policy = make_policy(name, **({} if threshold is None else {"threshold": threshold}))
    run = lab.live(
        subject.model,
        lab.smallest_pool(sizes, schedule.block_tokens, schedule.config.watermark) + schedule.spare,
        block_tokens=schedule.block_tokens,
        host_blocks=schedule.host_blocks,
        swap=schedule.swap,
        write_through=schedule.write_through,
        policy=policy,
        **vars(schedule.config),
        **options,
    )
    start = run.engine.executor.now()
    for asked, one, sampling in zip(schedule.asked, known, samplings, strict=True):
        run.submit(one.prompt, sampling, start + asked.after_ms / 1e3)
    outputs = run.finish()
    assert outputs == [one.expected(sampling) for one, sampling in zip(known, samplings, strict=True)], schedule
    assert sum(request.preemptions for request in run.requests) == len(run.trace.recoveries)
    seen = Counter(f"{recovery.action}: {recovery.reason}" for recovery in run.trace.recoveries)
    shared = run.engine.prefixes is not None and run.engine.prefixes.hit_tokens > 0
    return seen + Counter(mixed=any(step.prefills and step.contexts for step in run.trace.steps), shared=shared)
