"""The names of the tensors of a Llama-like model, and their dtypes in the words of safetensors and of torch (standard
library only)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
}
"""What safetensors calls a dtype: its name in torch, and the bytes of one number."""

SERVED = ("F32", "F16", "BF16")  # what a model computes in
COARSE = tuple(name for name in DTYPES if name not in SERVED)  # what a tensor may be rounded to on its way

_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.")


def layer_of(name: str) -> int | None:
    """The layer (0-based) that a tensor belongs to; None for the embedding, the norm and the head."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that safetensors ("BF16") or torch itself ("bfloat16") calls ``name``; this imports torch."""
    import torch

    return getattr(torch, DTYPES[name][0] if name in DTYPES else name)
