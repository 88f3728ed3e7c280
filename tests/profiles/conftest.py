"""What the profiles are held against: the true sizes of their models and data, pinned."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from firsttoken.assets.needs import TEXT
from firsttoken.assets.shapes import shape_config
from firsttoken.progressiveserve.training import PROMPTS

LLAMA_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SHAPES = {  # of the models that profiles name, as their config.json has it
    "smollm2-135m": "smollm2-135m",
    "gemma3-270m": "",
    "tinyllama-1.1b": "tinyllama-1.1b",
    "qwen2.5-coder-0.5b": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Team-ACE/ToolACE-8B": "llama-3.1-8b",
}
DEVICE_BYTES = {  # small machines, an H200, and the A100 that the paper profile names
    "quick": 8 << 30,
    "review": 8 << 30,
    "full": 8 << 30,
    "gpu": 140 << 30,
    "paper": 80 << 30,
}

# Counted in the pinned files with SmolLM2's tokenizer, which cuts text into fewer tokens than Llama-2's. Of the Hub's
# sets, whose validation files the hash cuts 20 : 80, the least that is likely.
HELD = {
    "train questions of sciq": 511,
    "validation questions of sciq": 55,
    "test questions of sciq": 259,
    "test questions of triviaqa": 2552,
    "validation questions of hub:rajpurkar/squad": 2000,
    "test questions of hub:rajpurkar/squad": 8300,
    "test questions of hub:mandarjoshi/trivia_qa:rc.nocontext": 14000,
    f"{TEXT}, train": 938_694,
    f"{TEXT}, validation": 177_477,
    f"{TEXT}, test": 169_549,
    PROMPTS: 7988,
}
LONGBENCH = 112  # held out of the 150 of multifieldqa_en, the smallest of its sets
CONSTRUCTED = {("qa", 320): 264, ("lead", 192): 437, ("copy", 192): 668}  # held-out items by prefix, SmolLM2's tokens


@dataclass(frozen=True)
class Truth:
    """What there is: ``models`` that profiles name, ``held`` by what a need is of, held-out items of tasks, devices."""

    models: tuple[str, ...]
    held: dict[str, int]
    constructed: dict[tuple[str, int], int]
    longbench: int
    device_bytes: dict[str, int]

    @staticmethod
    def config(spec: str) -> PretrainedConfig:
        """The configuration of a model that a profile names, or named once."""
        if spec == "gemma3-270m":  # as deep and with as long a context, and no width: no profile weighs it
            heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 512}
            sizes = {"num_hidden_layers": 18, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 257}
            return Gemma3TextConfig(**heads, **sizes, max_position_embeddings=32768)
        if "70B" in spec:
            return LlamaConfig(**LLAMA_70B, tie_word_embeddings=False)
        return shape_config(SHAPES.get(spec, spec.removeprefix("random:")))


@pytest.fixture(scope="session")
def truth() -> Truth:
    return Truth(tuple(SHAPES), HELD, CONSTRUCTED, LONGBENCH, DEVICE_BYTES)
