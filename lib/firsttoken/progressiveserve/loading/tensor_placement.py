"""What the tensors of a model are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from firsttoken.lean.lean_model import LeanModel
from firsttoken.progressiveserve.checkpoint.names import DTYPES, HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Build: TypeAlias = "Callable[[Path, torch.dtype], PreTrainedModel | LeanModel]"
"""Makes the model of a folder's config.json, in a dtype, without memory for its weights."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that safetensors ("BF16") or torch itself ("bfloat16") calls ``name``."""
    return getattr(torch, DTYPES[name][0] if name in DTYPES else name)


def untied_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters of ``model`` by name, each once: without a head that is the embedding."""
    tied = model.config.tie_word_embeddings
    return {name: tuple(p.shape) for name, p in model.named_parameters() if not (tied and name == HEAD)}
