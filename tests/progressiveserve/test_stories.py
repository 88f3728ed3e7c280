"""llama2.c's file read as transformers computes it: every tensor in its place, and what is no such file refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from firsttoken.study.errors import AssetError
from firsttoken_studies.stories import read_llama2c

DIM, HIDDEN, LAYERS, HEADS, VOCABULARY, CONTEXT = 16, 24, 2, 2, 32, 8
ORDER = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"),
)


@pytest.fixture
def written(tmp_path: Path) -> tuple[LlamaForCausalLM, Path]:
    """A tiny model of transformers, and the file that llama2.c has of it: queries and keys row by row."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    state, half = model.state_dict(), DIM // HEADS // 2
    tensors = [state["model.embed_tokens.weight"]]
    for name in ORDER:
        for layer in range(LAYERS):
            tensor = state[f"model.layers.{layer}.{name}.weight"]
            if name.endswith(("q_proj", "k_proj")):
                rows = [
                    head * 2 * half + i + which * half for head in range(HEADS) for i in range(half) for which in (0, 1)
                ]
                tensor = tensor[rows]
            tensors.append(tensor)
    tensors += [state["model.norm.weight"], torch.zeros(CONTEXT, half)]  # rotary tables follow, and are not read
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, HEADS, VOCABULARY, CONTEXT)
    path = tmp_path / "tiny.data"
    path.write_bytes(header + b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors))
    return model, path


def test_it_answers_as_the_model_that_was_written(written):
    model, path = written
    ids = torch.tensor([[1, 5, 9, 30, 2]])
    found = read_llama2c(path)
    assert torch.equal(found(ids).logits, model(ids).logits)
    assert found.lm_head.weight is found.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:20], "too short for a header"),
        (lambda data: data[: len(data) // 2], "truncated: shorter than its header says"),
        (lambda data: struct.pack("<i", -DIM) + data[4:], "its header names no model of llama2.c"),
        (lambda data: struct.pack("<2i", DIM, 1 << 30) + data[8:], "its header names no model of llama2.c"),
        (lambda data: struct.pack("<2i", DIM, 1 << 16) + data[8:], "truncated: shorter than its header says"),
    ],
)
def test_what_is_no_such_file(written, damage, words):
    _, path = written
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(AssetError, match=words) as caught:
        read_llama2c(path)
    assert "\n" not in str(caught.value)
