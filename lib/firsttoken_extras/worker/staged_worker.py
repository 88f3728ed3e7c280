"""The service with a model in stages in a worker process: it grows there while it serves, and is brought again where
the worker dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from firsttoken.assets.held import seen
from firsttoken.engine.model_server import LoadingServer
from firsttoken.engine.request import LayerRecompute, Request
from firsttoken.engine.request_limits import BLOCK_TOKENS, RequestLimits
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, read_manifest
from firsttoken.progressiveserve.checkpoint.names import torch_dtype
from firsttoken.service.served_model import receivers, use_prefixes
from firsttoken.service.service_config import ServiceConfig
from firsttoken.study import dtypes
from firsttoken.study.errors import FirstTokenError, ModelError, RequestError, files_alone
from firsttoken_extras.worker.forkserver import WorkerGone
from firsttoken_extras.worker.remote_executor import RemoteExecutor, RemoteVariant
from firsttoken_extras.worker.worker_config import WorkerConfig
from firsttoken_extras.worker.worker_model import best_stage, files_seen, stage_key

_POLL_S, _SELDOM_S = 0.05, 1.0  # between two looks at what the worker has, and once that is all


@dataclass(eq=False)
class RemoteStage:
    """Stands for the ``stage`` of ``depth`` layers that a worker has: another one once that has lost its own."""

    executor: RemoteExecutor
    stage: int
    depth: int

    @property
    def key(self) -> str:
        """What the worker knows it by."""
        return stage_key(self.stage)

    def redo(self, request: Request, layers: range) -> LayerRecompute:
        """All of ``request`` again: the worker keeps no hidden states."""
        return LayerRecompute(range(self.depth), request.cached if request.redo is None else request.redo.end)

    def adopt(self, request: Request) -> None:
        """Let the worker learn anew what ``request`` is, which computes with this from now on."""
        self.executor.forget(request)


class StagesExecutor(RemoteExecutor):
    """Runs steps in a worker that brings the stages of ``manifest``, from stage 1 on; a step waits until there is one.

    A worker that takes the place of a lost one begins with the best stage whose files are here: over a shaped link with
    the best that had come, else with the last one that is whole in the folder. ``told`` is what the worker has said of
    its stages; ``heard`` is called with that and how many workers were lost; ``closing`` ends what waits for it. Raises
    as RemoteExecutor, once as many workers were lost before a stage as a request may lose.
    """

    def __init__(
        self,
        config: WorkerConfig,
        manifest: Manifest,
        closing: threading.Event,
        heard: Callable[[dict[str, Any], int], None],
    ) -> None:
        self._manifest, self._closing, self._heard = manifest, closing, heard
        self._reached = 1
        self.told: dict[str, Any] = {}
        self.version: RemoteStage = RemoteStage(self, 0, manifest.depth)
        self._given = [self.version]
        super().__init__(config)

    def look(self) -> None:
        """Ask the worker what it has. Raises DeviceLost."""
        self._hear(self._ask("stages", lambda: [self.version.stage]))

    def stand_for(self, stage: int) -> RemoteStage:
        """What requests compute with from now on, as the worker has ``stage``."""
        self._given.append(RemoteStage(self, stage, self._manifest.depth))
        return self._given[-1]

    def _hear(self, told: dict[str, Any]) -> None:
        self.told, self._reached = told, max(self._reached, told["stage"])
        self._heard(told, self.lost)

    def _start(self) -> None:
        for left in range(self.config.retries, -1, -1):
            try:
                self._bring(best_stage(Path(self.config.model), self._manifest, self._most()) if self.lost else 1)
                return
            except WorkerGone:
                self.lost += 1
                if not left or self._closing.is_set():
                    raise

    def _most(self) -> int:
        return self._reached if self.config.gbit_per_s else len(self._manifest.stages)

    def _bring(self, first: int) -> None:
        """Start a worker, and wait until it has stage ``first``, which all that was given stands for from then on."""
        self.config = replace(self.config, first_stage=first)
        super()._start()
        try:
            while True:
                self._hear(self._say("stages", [first], self.config.step_s))
                if self.told["state"] == "failed":
                    raise ModelError(self.told["error"])
                if self.told["stage"]:
                    break
                if self._closing.wait(_POLL_S):
                    raise WorkerGone("the server is being closed")
        except BaseException:
            self._end()
            raise
        for one in self._given:
            one.stage = self.told["stage"]


class StagedWorkerServer(LoadingServer):
    """Serves the staged checkpoint of ``config`` from its first stage on, in a worker, with its variants once the last
    stage is there. ``broken`` is told of what leaves no hope."""

    def __init__(self, config: ServiceConfig, limits: RequestLimits, broken: Callable[[FirstTokenError], None]) -> None:
        super().__init__(limits, config.device, 1.0, broken)
        self._config, self._variants = config, dict(config.variants)
        self._remote: StagesExecutor | None = None
        self._told: dict[str, Any] = {}
        self._lost = 0

    def status(self) -> dict[str, Any]:
        """Return what a server that loads says, by what the worker has told last, and how many workers were lost."""
        told, status = self._told, super().status()
        if not told:
            return status | {"workers_lost": self._lost}
        late_s = told["started_s"] - self._started_s
        there = [one for one in told["events"] if one["what"] not in ("started", "serving")]
        events = [*status["events"], *(one | {"at_s": one["at_s"] + late_s} for one in there)]
        more = {"events": sorted(events, key=lambda one: one["at_s"]), "workers_lost": self._lost}
        return status | {key: told[key] for key in ("bytes_loaded", "bytes_total")} | more

    def close(self) -> None:
        super().close()
        if self._remote is not None:
            self._remote.close()

    def _read_ahead(self, answers: object) -> None:
        """Do nothing: the worker reads."""

    def _import(self) -> None:
        """Import no more: the worker loads."""

    def _begin(self) -> bool:
        """Wait until a worker has a stage. What is wrong with the files it says at once; what may pass, it tries
        again."""
        config, limits = self._config, self.limits
        with files_alone():
            manifest = read_manifest(config.folder)
            self._dtype = dtypes.serving(dtypes.AUTO, torch_dtype(manifest.dtype), config.device)
            self._sha256 = manifest.source_sha256 or ""
            worker = WorkerConfig(
                str(config.folder),
                limits.blocks,
                block_tokens=BLOCK_TOKENS,
                host_blocks=limits.host_blocks,
                dtype=dtypes.name_of(self._dtype),
                device=config.device,
                threads=torch.get_num_threads(),
                weights=seen(files_seen(config.folder, self._variants)),
                variants=tuple((name, str(folder)) for name, folder in config.variants),
                first_stage=1,
                gbit_per_s=config.gbit_per_s,
                readers=config.threads,
            )
            self._remote = StagesExecutor(worker, manifest, self._closing, self._hear)
        self._first = self._remote.version.stage
        self._run(self._remote)
        self._take_over(self._first)
        return True

    def _go_on(self) -> None:
        """Look what the worker has, until the server is being closed."""
        while not self._closing.wait(_SELDOM_S if self._stage == self._stages else _POLL_S):
            with suppress(RequestError):
                self._server.between(self._look)

    def _look(self) -> None:
        """Between two steps: let requests compute with what the worker has."""
        remote = self._remote
        self._server.asking(remote.look)
        if (stage := remote.told["stage"]) != remote.version.stage:
            self._server.publish(remote.stand_for(stage), lambda old, new: range(new.depth))
        if stage != self._stage:
            self._take_over(stage)
            self._serving(stage)

    def _take_over(self, stage: int) -> None:
        whole = stage == self._stages
        self._server.versions = {name: RemoteVariant(name, stage) for name in self._variants} if whole else {}
        if whole and (store := self._config.prefix_store) is not None:
            threading.Thread(target=self._use_prefixes, args=(store, stage), daemon=True).start()

    def _hear(self, told: dict[str, Any], lost: int) -> None:
        if lost > self._lost:  # what was served is gone, and so is what was stored of it
            self._note(told["stage"], f"worker {lost} was lost, and another begins")
            self._stage = 0
            if self._server is not None:
                self._server.sources = None
        self._told, self._lost, self._stages = told, lost, told["stages"]
        self._error = told["error"] or ""

    def _use_prefixes(self, store: Path, stage: int) -> None:
        who = partial(
            receivers, self._config.folder, self._dtype, self._config.prefix_owner, self._variants, self._sha256
        )
        self._note(stage, use_prefixes(self, store, who, "cpu", others=False))
