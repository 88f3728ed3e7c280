"""The costs of a swap and a recompute on this machine, as its own engine sees them: measured once, and kept."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.cps.costs.crossing import crossing
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.preemption import Swap
from firsttoken.engine.preemption.preemption_policy import Action, Observation
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.files import write_text
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.progress import track

LENGTHS = (64, 256, 1024)  # tokens
REPEATS = 3  # after one that warms up; 7 s of SmolLM2-135M on two cores


class _ObservingSwap(Swap):
    """A policy that swaps every victim, and keeps what the engine observes."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)


@dataclass(frozen=True)
class RecoveryCosts:
    """Recoveries that were ``seen`` on ``day`` (2026-11-27)."""

    seen: tuple[Observation, ...]
    day: str

    def __str__(self) -> str:
        """Return the rule that follows from the recoveries, and the medians by length."""
        cost = {way: self._medians(way) for way in Action}
        swapped, again = cost[Action.SWAP], cost[Action.RECOMPUTE]
        costs_text = [f"{n:,} tokens {1e3 * swapped[n]:,.1f} and {1e3 * again[n]:,.1f} ms" for n in swapped]
        if len(swapped) > 1:
            rule = crossing(list(swapped), list(swapped.values()), list(again.values())).verdict
        else:
            rule = f"{'swap' if swapped[min(swapped)] <= again[min(swapped)] else 'recompute'} always"
        return f"{rule} (swapped and recomputed, measured here on {self.day}: {'; '.join(costs_text)})"

    def _medians(self, way: Action) -> dict[int, float]:
        """Seconds by length, from short to long; a prefill is of one token less than the request then holds."""
        by_length: dict[int, list[float]] = {}
        for observation in self.seen:
            if observation.action is way:
                by_length.setdefault(observation.tokens + (way is Action.RECOMPUTE), []).append(observation.seconds)
        from statistics import median  # a start that measures nothing, as all is kept, has no use for it

        return {tokens: median(seconds) for tokens, seconds in sorted(by_length.items())}


def measure(executor: Executor, config: EngineConfig) -> RecoveryCosts | None:
    """Prefill and swap requests of ``LENGTHS`` tokens, as far as context and pool of ``executor`` have room for them.

    Nothing else may run there meanwhile. ``config`` is that of the engine which will serve. None where not even three
    tokens have room, and where nothing can be swapped.
    """
    rng, observer = random.Random(0), _ObservingSwap()
    most = min(executor.limits.context, executor.blocks * executor.block_tokens) - 2
    if most < 3:
        return None
    cases = [(length, turn) for length in sorted({min(n, most) for n in LENGTHS}) for turn in range(-1, REPEATS)]
    for length, turn in track(cases, desc="what a preemption costs here"):
        before = len(observer.observations)
        engine = Engine(executor, config, policy=observer)
        prompt = [rng.randrange(executor.limits.vocabulary) for _ in range(length - 1)]
        request = engine.submit(prompt, Sampling(3))
        while len(request.output) < 2:  # the prefill, and one step more: `length` tokens are cached
            engine.step()
        engine.scheduler.preempt(request)
        engine.run()
        if turn < 0:
            del observer.observations[before:]
    if {observation.action for observation in observer.observations} != set(Action):
        return None
    return RecoveryCosts(tuple(observer.observations), time.strftime("%Y-%m-%d"))


def kept(file: Path, identity: Mapping[str, Any]) -> RecoveryCosts | None:
    """Return the costs in ``file`` if they are of the machine and model of ``identity``, both ways; else None."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, FirstTokenError):
        held = read_json(file)
        if held["of"] == identity:
            rows = [(Action(action), int(tokens), float(seconds)) for action, tokens, seconds in held["seen"]]
            if {action for action, _, _ in rows} == set(Action):
                return RecoveryCosts(tuple(Observation(*row, 0.0) for row in rows), str(held["day"])[:10])
    return None


def keep(file: Path, identity: Mapping[str, Any], costs: RecoveryCosts) -> None:
    """Write ``costs`` to ``file``; a cache that cannot be written costs these seconds at the next start again."""
    rows = [[str(observation.action), observation.tokens, observation.seconds] for observation in costs.seen]
    with suppress(OSError):
        write_text(file, json.dumps({"of": dict(identity), "day": costs.day, "seen": rows}, indent=1) + "\n")
