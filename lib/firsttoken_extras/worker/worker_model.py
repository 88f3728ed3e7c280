"""The model that a worker hosts: whole, and lean where its folder lets it, since a worker that is lost is waited for;
or a staged checkpoint, by what serves one in one process, without the engine, which is in another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from firsttoken.assets.checkpoint import weight_files
from firsttoken.assets.held import unchanged
from firsttoken.assets.servable import check_servable
from firsttoken.engine.fused import fuse
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.lean import build  # noqa: F401 (once, for all that are copied from the process that imports this)
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.checkpoint.manifest import MANIFEST, Manifest, check_files
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.service.served_model import late_variants, load_plain
from firsttoken.service.variants import adapter_files, host_variants
from firsttoken.study.dtypes import named
from firsttoken.study.errors import FirstTokenError, ModelError
from firsttoken.study.system.openmp import loops_on_one_core
from firsttoken_extras.worker.worker_config import WorkerConfig


def load_worker_model(config: WorkerConfig) -> nn.Module:
    """The model of ``config``, fused unless it has variants; that of a folder is held in memory of its own. Raises
    ModelError and AssetError as ``load_model`` and ``load_plain``, and ModelError for weights that were changed."""
    folder, dtype = Path(config.model), named(config.dtype)
    if folder.is_dir():
        with unchanged(_files(config), config.weights):
            model = load_plain(check_servable(folder), dtype, config.device)
    else:
        from firsttoken.assets.models import load_model

        model = load_model(config.model, dtype=dtype, device=config.device, with_tokenizer=False).model
    return model if config.variants else fuse(model)


def load_worker_variants(config: WorkerConfig, executor: LiveExecutor) -> dict[str, ModelVersion]:
    """By name, the variants of the model that ``executor`` runs, which is fused with them. Raises StageError as
    ``read_variants``, and ModelError for adapters that were changed."""
    if not config.variants:
        return {}
    with unchanged(_files(config), config.weights):
        folders = {name: Path(folder) for name, folder in config.variants}
        versions = host_variants(executor, folders, check_servable(Path(config.model)), config.device)
    executor.model.model.layers = nn.ModuleList()  # the version has them, and frees each as it is fused
    for _ in executor.version.fuse():
        pass
    return versions


def _files(config: WorkerConfig) -> list[Path]:
    return weight_files(Path(config.model)) + adapter_files({name: Path(folder) for name, folder in config.variants})


def best_stage(folder: Path, manifest: Manifest, most: int) -> int:
    """The last stage, at most stage ``most``, of which all files are in ``folder`` and whole, as are those of the
    stages below it; 1 where there is none."""
    for stage in range(most, 1, -1):
        try:
            check_files(folder, manifest, stages=range(1, stage + 1))
            return stage
        except ModelError:
            continue
    return 1


def files_seen(folder: Path, variants: Mapping[str, Path]) -> list[Path]:
    """The files that are the same for every worker. Raises StageError for an adapter that is not there."""
    return [folder / MANIFEST, *adapter_files(variants)]


def stage_key(stage: int) -> str:
    """What engine and worker call the version of a stage: no variant has such a name."""
    return f"stage {stage}"


class StageHost(StagedServer):
    """Brings the stages of ``config`` as a StagedServer does, for steps that are ordered from elsewhere. These have
    ``turn``, as everything has that changes weights; ``versions`` are the stages and variants to compute with."""

    def __init__(self, config: WorkerConfig) -> None:
        self.turn = threading.Lock()
        self.versions: dict[str, ModelVersion] = {}
        self._config = config
        self._there = queue.SimpleQueue[LiveExecutor | FirstTokenError]()
        super().__init__(
            Path(config.model),
            [Link(LinkConfig(config.gbit_per_s))],
            device=config.device,
            dtype=config.dtype,
            threads=config.readers,
            begin=config.first_stage,
            broken=self._there.put,
        )
        self._adapters = {name: Path(folder) for name, folder in config.variants}
        if self._adapters:
            self.variants = partial(late_variants, self._adapters, config.device)

    def status(self) -> dict[str, Any]:
        """Return what any server says, and when it started on the machine's monotonic clock."""
        return super().status() | {"started_s": self._started_s}

    def hosted(self) -> LiveExecutor:
        """Begin; what runs the steps, once there is a model without weights. Raises what leaves no hope, and ModelError
        for another manifest or adapter than the first worker had."""
        with unchanged(files_seen(self._loader.folder, self._adapters), self._config.weights):
            self.start()
            there = self._there.get()
        if isinstance(there, FirstTokenError):
            raise there
        return there

    def forget_all_but(self, serving: int, used: Collection[ModelVersion | None]) -> None:
        """Let go of the stages before stage ``serving`` that compute for nobody."""
        for key, version in list(self.versions.items()):
            if version.stage < serving and version not in used:
                del self.versions[key]

    def _executor(self, model: nn.Module, device: torch.device) -> LiveExecutor:
        config = self._config
        sizes = {"block_tokens": config.block_tokens, "host_blocks": config.host_blocks, "swap": config.swap}
        return LiveExecutor(model, config.blocks, **sizes, device=device, touched=False)

    def _run(self, executor: LiveExecutor, *_: Any) -> StepGate:
        loops_on_one_core()
        self.versions[stage_key(executor.version.stage)] = executor.version
        self._server = StepGate(self)
        self._there.put(executor)
        return self._server


class StepGate:
    """Stands in a worker for the engine that a StagedServer has: what it wishes is done between two steps."""

    def __init__(self, host: StageHost) -> None:
        self._host = host

    def between(self, what: Callable[[], Any]) -> Any:
        """Return what ``what`` returns, called while no step runs."""
        with self._host.turn:
            return what()

    soon = between

    def publish(self, version: ModelVersion, _: object) -> None:
        """Let steps compute with the stage that ``version`` is; the engine moves requests."""
        self._host.versions[stage_key(version.stage)] = version

    @property
    def versions(self) -> Mapping[str, ModelVersion]:
        """The variants, beside the stages."""
        return self._host.versions

    @versions.setter
    def versions(self, variants: Mapping[str, ModelVersion]) -> None:
        self._host.versions |= variants

    def close(self, _: Exception) -> None:
        """Do nothing: requests are the engine's."""
