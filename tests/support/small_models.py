"""Small models with random weights, which are large enough for their tokens to differ."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from firsttoken_cpu.native.exports import PRODUCTS
from firsttoken_cpu.native.library import NativeLinear

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def small_model(family: str, **keys: Any) -> PreTrainedModel:
    """One of ``family`` in float32 and eval mode, its norms and biases random too."""
    config = getattr(transformers, f"{family}Config")(**(SMALL | keys))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def packed_by_kernels(layer: nn.Module) -> dict[str, NativeLinear]:
    """The products of a decoder ``layer`` by name, as the kernels have them, whatever multiplies on this processor."""
    linears = {name: [layer.get_submodule(path) for path in paths] for name, paths in PRODUCTS.items()}
    return {name: NativeLinear(some, gated=name == "gate_up") for name, some in linears.items()}
