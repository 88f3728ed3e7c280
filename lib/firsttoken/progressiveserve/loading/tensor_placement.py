"""What the tensors of a model are, and that each of them was brought."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from firsttoken.assets.empty_model import build_on_meta
from firsttoken.lean.build import lean_on_meta
from firsttoken.lean.lean_config import OtherWay
from firsttoken.lean.lean_model import LeanModel
from firsttoken.progressiveserve.checkpoint.names import DTYPES, HEAD
from firsttoken.study.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Build: TypeAlias = "Callable[[Path, torch.dtype], PreTrainedModel | LeanModel]"
"""Makes the model of a folder's config.json, in a dtype, without memory for its weights."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that safetensors ("BF16") or torch itself ("bfloat16") calls ``name``."""
    return getattr(torch, DTYPES[name][0] if name in DTYPES else name)


def build_lean(folder: Path, dtype: torch.dtype) -> LeanModel | PreTrainedModel:
    """Build the model as :func:`build_on_meta` does, but without transformers.

    A model that asks for more is built by that function, and a line on stderr says why.
    """
    try:
        return lean_on_meta(folder, dtype)
    except OtherWay as reason:
        print(f"firsttoken: {folder.name} starts with transformers' own modules: {reason}", file=sys.stderr)
        return build_on_meta(folder, dtype)


def untied_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters of ``model`` by name, each once: without a head that is the embedding."""
    tied = model.config.tie_word_embeddings
    return {name: tuple(p.shape) for name, p in model.named_parameters() if not (tied and name == HEAD)}


def finish(model: LeanModel | PreTrainedModel) -> LeanModel | PreTrainedModel:
    """Tie the head where the model ties it. Raises ModelError naming the first parameter that is still missing."""
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(f"{len(missing)} parameters were never brought, first {missing[0]}; copy the whole checkpoint")
    return model
