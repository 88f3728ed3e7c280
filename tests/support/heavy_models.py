"""Tiny models of several kinds whose layers matter, each made once."""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen2Config

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"factor": 4.0},
}
GEMMA3 = {  # two bases, and a window that is shorter than the prefixes
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}


@lru_cache
def heavy_model(
    seed: int, layers: int = 4, kind: str = "llama", rope: str = "default", vocabulary: int = 256
) -> PreTrainedModel:
    """Untied, in eval mode, with weights larger than at the start of a training, so that tokens look at one another.

    The same call gives the same object: do not change it.
    """
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "gemma3": Gemma3TextConfig}
    positions = {"rope_parameters": {"rope_type": rope, "rope_theta": 1e4} | ROPES[rope]}
    config = kinds[kind](
        **(positions if kind != "gemma3" else GEMMA3),
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
