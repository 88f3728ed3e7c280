"""The cross-point of the machine that serves: measured before its first request, and followed from there."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from firsttoken.assets.model_config import read_config
from firsttoken.cps.crossing import crossing
from firsttoken.cps.policies.online import OnlineCrossPoint
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.preemption import Swap
from firsttoken.engine.preemption.preemption_policy import Action, Observation
from firsttoken.engine.request import Sampling
from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.files import write_text
from firsttoken.study.machine import identity
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.progress import track
from firsttoken.study.system.alone import alone

LENGTHS = (64, 256, 1024)  # tokens
REPEATS = 3  # after one that warms up; 7 s of SmolLM2-135M on two cores
_SPACING_S = 1e6  # between two observations, so that none is taken for a part of the one before


class _ObservingSwap(Swap):
    """A policy that swaps every victim, and keeps what the engine observes."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)


@dataclass(frozen=True)
class RecoveryCosts:
    """Recoveries that were observed on ``day`` (2026-11-27)."""

    observations: tuple[Observation, ...]
    day: str

    def __str__(self) -> str:
        """Return the rule that follows from the recoveries, and the medians by length."""
        swapped, recomputed = self._medians(Action.SWAP), self._medians(Action.RECOMPUTE)
        costs_text = [f"{n:,} tokens {1e3 * swapped[n]:,.1f} and {1e3 * recomputed[n]:,.1f} ms" for n in swapped]
        if len(swapped) > 1:
            rule = crossing(list(swapped), list(swapped.values()), list(recomputed.values())).verdict
        else:
            rule = f"{'swap' if swapped[min(swapped)] <= recomputed[min(swapped)] else 'recompute'} always"
        return f"{rule} (swapped and recomputed, measured here on {self.day}: {'; '.join(costs_text)})"

    def _medians(self, action: Action) -> dict[int, float]:
        """Seconds by length, from short to long; a prefill is of one token less than the request then holds."""
        by_length: dict[int, list[float]] = {}
        for observation in self.observations:
            if observation.action is action:
                length = observation.tokens + (action is Action.RECOMPUTE)
                by_length.setdefault(length, []).append(observation.seconds)
        from statistics import median  # a start that measures nothing, as all is cached, has no use for it

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


def load_costs(file: Path, measured_for: Mapping[str, Any]) -> RecoveryCosts | None:
    """Return the costs in ``file`` if they are of the machine and model of ``measured_for``, both ways; else None."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, FirstTokenError):
        stored = read_json(file)
        if stored["of"] == measured_for:
            rows = [(Action(action), int(tokens), float(seconds)) for action, tokens, seconds in stored["seen"]]
            if {action for action, _, _ in rows} == set(Action):
                return RecoveryCosts(tuple(Observation(*row, 0.0) for row in rows), str(stored["day"])[:10])
    return None


def save_costs(file: Path, measured_for: Mapping[str, Any], costs: RecoveryCosts) -> None:
    """Write ``costs`` to ``file``; a cache that cannot be written costs these seconds at the next start again."""
    rows = [[str(observation.action), observation.tokens, observation.seconds] for observation in costs.observations]
    with suppress(OSError):
        write_text(file, json.dumps({"of": dict(measured_for), "day": costs.day, "seen": rows}, indent=1) + "\n")


class MeasuredCrossPoint(OnlineCrossPoint):
    """Begins with what a swap and a recompute of the model in ``folder`` cost on this machine, and learns on from there
    as they drift.

    :meth:`prepare` reads the costs from the cache folder, where they lie by machine, shape of the model, dtype, and
    ``device``. Where they do not, or with ``remeasure``, it measures them with the ``config`` that serves; a model that
    is not in a ``plain_folder``, and so not complete from its start, is not measured. Nobody else's threshold stands
    in: while nothing is known a victim is recomputed, and a swap is tried now and then.
    """

    name = "cross_point"

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        device: str = "cpu",
        remeasure: bool = False,
        plain_folder: bool = True,
    ) -> None:
        super().__init__(start=0)
        self._folder, self._device, self._remeasure, self._plain = folder, device, remeasure, plain_folder
        self._config = replace(config, share_prefixes=False)  # a prompt that is shared in part teaches nothing
        self._costs: RecoveryCosts | None = None
        self._prepared = False

    def measures(self, dtype: str) -> bool:
        """Return whether :meth:`prepare` will take the seconds to measure. Raises ModelError for a folder of no
        model."""
        if self._costs is None and not self._remeasure:
            self._costs = load_costs(*self._cache_entry(dtype))
        return self._costs is None and self._plain

    def prepare(self, executor: Executor, dtype: str) -> str:
        """Learn what is cached or measured, once; return what that is. Raises as ``measures``."""
        if self.measures(dtype):
            file, measured_for = self._cache_entry(dtype)
            with _locked(file):  # a replica beside this one would disturb, and may have measured meanwhile
                self._costs = None if self._remeasure else load_costs(file, measured_for)
                if self._costs is None:
                    self._costs = measure(executor, self._config)
                    if self._costs is not None:
                        save_costs(file, measured_for, self._costs)
        if self._costs is None:
            return "cross_point: what a swap costs here is not known yet, and is learnt while serving"
        if not self._prepared:  # a load that failed is tried again
            self._prepared = True
            for number, observation in enumerate(self._costs.observations, -len(self._costs.observations)):
                self.observe(replace(observation, now_s=number * _SPACING_S))
        return f"cross_point: {self._costs}"

    def _cache_entry(self, dtype: str) -> tuple[Path, dict[str, Any]]:
        """Return the file of these costs, and the machine and model that it has to name."""
        import torch

        shape = {key: value for key, value in asdict(read_config(self._folder)).items() if "dtype" not in key}
        setting = {"dtype": dtype, "way": self._device, "threads": torch.get_num_threads()}
        measured_for = json.loads(json.dumps({"machine": identity(), "model": shape} | setting))  # as it is read again
        digest = hashlib.sha256(json.dumps(measured_for, sort_keys=True).encode()).hexdigest()[:16]
        return paths.CACHE / "recovery-costs" / f"{digest}.json", measured_for


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with ExitStack() as locked:
        with suppress(OSError):  # in a cache that cannot be written nobody waits
            locked.enter_context(alone(file.with_suffix(".lock"), "measures what a preemption costs"))
        yield
