"""The cross-point of the machine that serves: measured before its first request, and followed from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from firsttoken.assets.model_config import read_config
from firsttoken.cps.costs.recoveries import RecoveryCosts, keep, kept, measure
from firsttoken.cps.policies.online import OnlineCrossPoint
from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.study import paths
from firsttoken.study.machine import identity
from firsttoken.study.system.alone import alone

_SPACING_S = 1e6  # between two observations, so that none is taken for a part of the one before


class MeasuredCrossPoint(OnlineCrossPoint):
    """Begins with what a swap and a recompute of the model in ``folder`` cost on this machine, and learns on from there
    as they drift.

    :meth:`prepare` reads the costs from the cache folder, where they lie by machine, shape of the model, dtype, and
    ``way``, which is the device and whatever else decides how the model is run. Where they do not, or are to be
    measured ``again``, it measures them with the ``config`` that serves; a model that is not in a ``plain_folder``, and
    so not whole from its start, is not measured. Nobody else's threshold stands in: while nothing is known a victim is
    recomputed, and a swap is tried now and then.
    """

    name = "cross_point"

    def __init__(
        self, folder: Path, config: EngineConfig, *, way: str = "cpu", again: bool = False, plain_folder: bool = True
    ) -> None:
        super().__init__(start=0)
        self._folder, self._way, self._again, self._whole = folder, way, again, plain_folder
        self._config = replace(config, share_prefixes=False)  # a prompt that is shared in part teaches nothing
        self._costs: RecoveryCosts | None = None
        self._prepared = False

    def measures(self, dtype: str) -> bool:
        """Return whether :meth:`prepare` will take the seconds to measure. Raises ModelError for a folder of no
        model."""
        if self._costs is None and not self._again:
            self._costs = kept(*self._place(dtype))
        return self._costs is None and self._whole

    def prepare(self, executor: Executor, dtype: str) -> str:
        """Learn what is kept or measured, once; return what that is. Raises as ``measures``."""
        if self.measures(dtype):
            file, measured_for = self._place(dtype)
            with self._alone(file):  # a replica beside this one would disturb, and may have measured meanwhile
                self._costs = None if self._again else kept(file, measured_for)
                if self._costs is None:
                    self._costs = measure(executor, self._config)
                    if self._costs is not None:
                        keep(file, measured_for, self._costs)
        if self._costs is None:
            return "cross_point: what a swap costs here is not known yet, and is learnt while serving"
        if not self._prepared:  # a load that failed is tried again
            self._prepared = True
            for number, observation in enumerate(self._costs.seen, -len(self._costs.seen)):
                self.observe(replace(observation, now_s=number * _SPACING_S))
        return f"cross_point: {self._costs}"

    @contextmanager
    def _alone(self, file: Path) -> Iterator[None]:
        with ExitStack() as locked:
            with suppress(OSError):  # in a cache that cannot be written nobody waits
                locked.enter_context(alone(file.with_suffix(".lock"), "measures what a preemption costs"))
            yield

    def _place(self, dtype: str) -> tuple[Path, dict[str, Any]]:
        """Return the file of these costs, and the machine and model that it has to name."""
        import torch

        shape = {key: value for key, value in asdict(read_config(self._folder)).items() if "dtype" not in key}
        how = {"dtype": dtype, "way": self._way, "threads": torch.get_num_threads()}
        measured_for = json.loads(json.dumps({"machine": identity(), "model": shape} | how))  # as it is read again
        digest = hashlib.sha256(json.dumps(measured_for, sort_keys=True).encode()).hexdigest()[:16]
        return paths.CACHE / "recovery-costs" / f"{digest}.json", measured_for
