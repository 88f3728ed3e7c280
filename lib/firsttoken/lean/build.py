"""A lean model without memory for its weights, or transformers' own where a config.json asks for more."""

from __future__ import annotations

from pathlib import Path

import torch

from firsttoken.assets.on_meta import on_meta
from firsttoken.lean.layers import RotaryEmbedding
from firsttoken.lean.lean_config import LeanConfig, lean_config
from firsttoken.lean.lean_model import LeanModel


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
