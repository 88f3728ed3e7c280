"""Tiny models of several kinds whose layers matter, each made once; the same in folders, with a tokenizer and items."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from byte_tokenizers import a_token_a_byte
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

    return make


@pytest.fixture(scope="session")
def folders(tiny: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models of 4 layers: "base" and "other" make a pair, "qwen2" and "stranger" (tokenizer) fit neither.

    Beside them "hotpotqa.jsonl", 60 rows of LongBench's form with contexts of more than 96 bytes.
    """
    root = tmp_path_factory.mktemp("models")
    for name, seed, kind, end in (
        ("base", 1, "llama", "<end>"),
        ("other", 2, "llama", "<end>"),
        ("qwen2", 1, "qwen2", "<end>"),
        ("stranger", 1, "llama", "<stop>"),
    ):
        tiny(seed, 4, kind, vocabulary=257).save_pretrained(root / name)
        a_token_a_byte(end).save_pretrained(root / name)
    draw, lines = random.Random(0), []
    for number in range(60):
        context = " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(40))
        row = {"_id": f"r{number}", "dataset": "hotpotqa", "input": f"Which {number}?", "context": context}
        lines.append(json.dumps(row | {"answers": ["ab"]}))
    (root / "hotpotqa.jsonl").write_text("\n".join(lines))
    return root
