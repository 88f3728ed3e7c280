"""Rotary angles of a table are those that the model computes, for positions in any order and as many as are asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from firsttoken.engine.rotary_table import RotaryTable

SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic"])
@given(steps=st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=5), min_size=1, max_size=4))
def test_angles_are_the_models_to_the_bit(kind, dtype, steps) -> None:
    """Each table grows as it is asked; those that depend on more than the position are computed each time."""
    told = {"rope_type": kind, "rope_theta": 1e4} | (SCALED if kind != "default" else {})
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=192, num_attention_heads=8, rope_parameters=told))
    table, hidden = RotaryTable(rotary, dtype, torch.device("cpu")), torch.zeros(1, 1, 8, dtype=dtype)
    for step in steps:
        where = torch.tensor([step])
        for mine, its in zip(table.lookup(hidden, where, max(step) + 1), rotary(hidden, where), strict=True):
            assert torch.equal(mine, its) and mine.dtype == dtype
