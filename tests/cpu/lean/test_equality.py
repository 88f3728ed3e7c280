"""Bit for bit what the stock modules say: no tolerance, in fp32 and in bf16."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_tokens import check_greedy, generated
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.assets.empty_model import set_parameter, tie_head
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import ModelError
from firsttoken_cpu.fused import FusedLayer, fuse
from firsttoken_cpu.lean.lean_model import LeanModel, lean_on_meta
from firsttoken_cpu.native.library import kernels
from firsttoken_studies.progressiveserve.coldstart.rival_loaders import load_with

IDS = torch.randint(97, (1, 29), generator=torch.Generator().manual_seed(1))
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("Llama", {"rope_parameters": LLAMA_3}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
]


def lean_of(folder: Path, dtype: torch.dtype = torch.float32) -> LeanModel:
    model = lean_on_meta(folder, dtype)
    for name, tensor in load_file(folder / "model.safetensors").items():
        set_parameter(model, name, tensor)
    return tie_head(model)


def said(model: Any) -> list[Tensor]:
    """Logits of a prompt, of three tokens after it, and of five more at once, with what was kept of them."""
    answers, ids, kept = [], IDS, None
    for step in range(5):
        answer = model(ids, past_key_values=kept, use_cache=True)
        kept = answer.past_key_values
        answers.append(answer.logits)
        ids = answer.logits[:, -1:].argmax(-1) if step < 3 else IDS[:, :5]
    return [*answers, model(IDS, use_cache=False, logits_to_keep=1).logits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "keys"), SHAPES)
@torch.inference_mode()
def test_logits(make, family, keys, dtype):
    stock, folder = make(family, dtype, **keys)
    for own, wanted in zip(said(lean_of(folder, dtype)), said(stock), strict=True):
        assert torch.equal(own, wanted)


@torch.inference_mode()
def test_named_tokens_and_positions(make):
    stock, folder = make()
    asked = {"position_ids": torch.arange(29)[None] + 100, "logits_to_keep": torch.tensor([3, 17]), "use_cache": False}
    assert torch.equal(lean_of(folder)(IDS, **asked).logits, stock(IDS, **asked).logits)


def served(model: LeanModel | PreTrainedModel, fused: bool) -> list[list[int]]:
    """What an engine with two requests at once says."""
    executor = LiveExecutor(fuse(model) if fused else model, blocks=32)
    try:
        engine = Engine(executor)
        prompts = IDS[0].tolist(), IDS[0, 7:18].tolist()
        requests = [engine.submit(prompt, Sampling(max_tokens=12)) for prompt in prompts]
        while engine.busy:
            engine.step()
        return [request.output for request in requests]
    finally:
        executor.close()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_tokens_of_the_paged_engine(make, family, fused):
    """Within the tolerance of plain_tokens, as pages and fused layers are other operations than `generate`'s."""
    stock, folder = make(family, eos_token_id=None)
    lean = lean_of(folder)
    answers = served(lean, fused)
    if fused and kernels() is not None:
        assert all(type(layer) is FusedLayer for layer in lean.model.layers)
    for prompt, answer in zip((IDS[0].tolist(), IDS[0, 7:18].tolist()), answers, strict=True):
        assert check_greedy(answer, generated(stock, prompt, 12)) == 12


@torch.inference_mode()
def test_a_plain_folder_loads(make):
    """In shards, in another dtype, and with the tables that old checkpoints hold."""
    stock, folder = make()
    (folder / "model.safetensors").unlink()
    stock.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    shard = next(file for file in folder.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(file))
    save_file(load_file(shard) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, shard)
    assert torch.equal(load_with("lean", folder, torch.float32)(IDS).logits, stock(IDS).logits)
    assert load_with("lean", folder, torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    save_file({name: tensor for name, tensor in load_file(shard).items() if "embed" not in name}, shard)
    with pytest.raises(ModelError, match=r"'model\.embed_tokens\.weight' is in .*, by the headers in none"):
        load_with("lean", folder, torch.float32)


def test_a_head_that_is_not_the_embedding_it_is_tied_to(make):
    _, folder = make(tie_word_embeddings=True)
    state = load_file(folder / "model.safetensors")
    for head, fault in ((state["model.embed_tokens.weight"].clone(), ""), (torch.ones(97, 64), "is tied to; set tie_")):
        save_file(state | {"lm_head.weight": head}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=fault) if fault else nullcontext():
            load_with("lean", folder, torch.float32)


def test_a_tensor_of_another_shape(make):
    _, folder = make()
    state = load_file(folder / "model.safetensors")
    save_file(state | {"model.norm.weight": torch.ones(63)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"norm\.weight in .* has the shape \[63\], by config\.json it has \[64\]"):
        load_with("lean", folder, torch.float32)
