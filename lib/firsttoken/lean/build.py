"""A lean model, or transformers' own where a config.json asks for more; with memory for its weights or without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from firsttoken.assets.checkpoint import ModelFiles
from firsttoken.assets.empty_model import build_on_meta, on_meta, put
from firsttoken.assets.weights import tensors_of
from firsttoken.lean.layers import RotaryEmbedding
from firsttoken.lean.lean_config import LeanConfig, OtherWay, lean_config
from firsttoken.lean.lean_model import LeanModel
from firsttoken.study.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def lean_on_meta(folder: Path, dtype: torch.dtype) -> LeanModel:
    """The lean model that ``folder/config.json`` describes: parameters on the meta device in ``dtype``, rotary tables
    real. Raises OtherWay and ModelError as :func:`lean_config`."""
    return empty_lean(lean_config(folder), dtype)


def empty_lean(config: LeanConfig, dtype: torch.dtype) -> LeanModel:
    """A model of ``config`` in eval mode, as :func:`lean_on_meta` makes it."""
    with on_meta(dtype):
        model = LeanModel(config)
    model.model.rotary_emb = RotaryEmbedding(config)
    return model.eval().requires_grad_(False)


def build_lean(folder: Path, dtype: torch.dtype) -> LeanModel | PreTrainedModel:
    """Build the model as :func:`build_on_meta` does, but without transformers.

    A model that asks for more is built by that function, and a line on stderr says why.
    """
    try:
        return lean_on_meta(folder, dtype)
    except OtherWay as reason:
        print(f"firsttoken: {folder.name} starts with transformers' own modules: {reason}", file=sys.stderr)
        return build_on_meta(folder, dtype)


def load_lean(files: ModelFiles, dtype: torch.dtype, device: str | torch.device) -> LeanModel | PreTrainedModel:
    """The model of :func:`build_lean` with its weights on ``device``, in memory of their own.

    Raises ModelError for a parameter that ``files`` lack, or that is another there.
    """
    model = build_lean(files.folder, dtype)
    model.model.rotary_emb.to(device)
    for name, tensor in tensors_of(files, device=device):
        put(model, name, tensor)
    return finish(model)


def finish(model: LeanModel | PreTrainedModel) -> LeanModel | PreTrainedModel:
    """Tie the head where the model ties it. Raises ModelError naming the first parameter that is still missing."""
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(f"{len(missing)} parameters were never brought, first {missing[0]}; copy the whole checkpoint")
    return model
