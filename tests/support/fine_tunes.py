"""Small LoRA fine-tunes of one base, as PEFT makes them and as an engine hosts them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig

from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.lora import Adapter, parse_adapter
from firsttoken.engine.shared_base import SharedBase

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = LlamaConfig(
    num_hidden_layers=3,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=260,
    max_position_embeddings=512,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)


def tuned(
    model: nn.Module,
    seed: int,
    modules: list[str] = MODULES,
    rank: int = 4,
    layers: Sequence[int] | None = None,
) -> nn.Module:
    """``model`` with an adapter of ``modules`` in ``layers`` (all of them, unless given)."""
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=modules,
        layers_to_transform=None if layers is None else list(layers),
    )
    peft = get_peft_model(copy.deepcopy(model), config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    return peft


def written(peft: nn.Module, folder: Path) -> Path:
    """``folder``, in which the adapter of ``peft`` is from now on."""
    peft.save_pretrained(folder)
    return folder


def adapter_in(folder: Path) -> Adapter:
    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    return parse_adapter(folder.name, *files, "cpu")


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def shared(
    base: nn.Module,
    variants: dict[str, tuple[nn.Module, Adapter]],
    blocks: int = 64,
    hidden_cache: HiddenStateCache | None = None,
    **options: Any,
):
    """An executor over a copy of the base, and its versions by name, "" the base's own."""
    model = copy.deepcopy(base)
    executor = LiveExecutor(model, blocks, **options)
    executor.version = mine = SharedBase(executor.version.decoder, hidden_cache)
    versions = {name: mine.variant(model, adapter) for name, (_, adapter) in variants.items()}
    return executor, versions | {"": mine}
