"""The model that a worker hosts: lean where its folder lets it, since a worker that is lost is waited for."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from firsttoken.assets.checkpoint import weight_files
from firsttoken.assets.empty_model import put
from firsttoken.assets.held import hold, unchanged
from firsttoken.engine.apart.config import WorkerConfig
from firsttoken.engine.fused import fuse
from firsttoken.lean.build import lean_on_meta
from firsttoken.lean.config import OtherWay
from firsttoken.lean.model import LeanModel
from firsttoken.study.dtypes import named
from firsttoken.study.errors import ModelError


def hosted_model(config: WorkerConfig) -> nn.Module:
    """The model of ``config``, held in memory of its own. Raises ModelError and AssetError as ``load_model``, and
    ModelError for weights that were changed."""
    folder = Path(config.model)
    if not folder.is_dir():
        model = _stock(config)
    else:
        with unchanged(weight_files(folder), config.weights):
            try:
                model = _lean(folder, config)
            except OtherWay:
                model = _stock(config)
            model = hold(model)
    return fuse(model) if config.fused else model


def _lean(folder: Path, config: WorkerConfig) -> LeanModel:
    model = lean_on_meta(folder, named(config.dtype))
    model.model.rotary_emb.to(config.device)
    for file in weight_files(folder):
        for name, tensor in load_file(file, config.device).items():
            if not name.endswith(".rotary_emb.inv_freq"):  # of old checkpoints; transformers passes it over, too
                put(model, name, tensor)
    model.tie_weights()
    if missing := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}; copy the whole checkpoint")
    return model


def _stock(config: WorkerConfig) -> nn.Module:
    from firsttoken.assets.models import load_model

    return load_model(config.model, dtype=named(config.dtype), device=config.device, with_tokenizer=False).model
