"""The model that a worker hosts: lean where its folder lets it, since a worker that is lost is waited for."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from firsttoken.assets.checkpoint import weight_files
from firsttoken.assets.empty_model import put
from firsttoken.assets.held import hold, unchanged
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weights import tensors_of
from firsttoken.engine.fused import fuse
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.lean.build import lean_on_meta
from firsttoken.lean.lean_config import OtherWay
from firsttoken.lean.lean_model import LeanModel
from firsttoken.service.variants import adapter_files, host_variants
from firsttoken.study.dtypes import named
from firsttoken_extras.worker.worker_config import WorkerConfig


def load_worker_model(config: WorkerConfig) -> nn.Module:
    """The model of ``config``, held in memory of its own, and fused unless it has variants. Raises ModelError and
    AssetError as ``load_model``, and ModelError for weights that were changed."""
    folder = Path(config.model)
    if not folder.is_dir():
        model = _stock(config)
    else:
        with unchanged(_files(config), config.weights):
            try:
                model = _lean(folder, config)
            except OtherWay:
                model = _stock(config)
            model = hold(model)
    return fuse(model) if config.fused and not config.variants else model


def load_worker_variants(config: WorkerConfig, executor: LiveExecutor) -> dict[str, ModelVersion]:
    """By name, the variants of the model that ``executor`` runs, which is fused with them. Raises StageError as
    ``read_variants``, and ModelError for adapters that were changed."""
    if not config.variants:
        return {}
    with unchanged(_files(config), config.weights):
        folders = {name: Path(folder) for name, folder in config.variants}
        versions = host_variants(executor, folders, check_servable(Path(config.model)), config.device)
    executor.model.model.layers = nn.ModuleList()  # the version has them, and frees each as it is fused
    for _ in executor.version.fuse() if config.fused else ():
        pass
    return versions


def _files(config: WorkerConfig) -> list[Path]:
    return weight_files(Path(config.model)) + adapter_files({name: Path(folder) for name, folder in config.variants})


def _lean(folder: Path, config: WorkerConfig) -> LeanModel:
    model = lean_on_meta(folder, named(config.dtype))
    model.model.rotary_emb.to(config.device)
    for name, tensor in tensors_of(check_servable(folder), device=config.device):
        put(model, name, tensor)
    model.tie_weights()
    return model


def _stock(config: WorkerConfig) -> nn.Module:
    from firsttoken.assets.models import load_model

    return load_model(config.model, dtype=named(config.dtype), device=config.device, with_tokenizer=False).model
