"""Tiny models of several kinds whose layers matter, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

torch.set_num_threads(1)

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
MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def tiny() -> MakeModel:
    """``tiny(seed, layers=4, kind="llama", rope="default", vocabulary=256)``: untied, in eval mode, large weights.

    Larger than at the start of a training, so that tokens look at one another. The same call gives the same object:
    do not change it.
    """

    @lru_cache
    def make(
        seed: int, layers: int = 4, kind: str = "llama", rope: str = "default", vocabulary: int = 256
    ) -> PreTrainedModel:
        config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rope_parameters={"rope_type": rope, "rope_theta": 1e4} | ROPES[rope],
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

    return make
