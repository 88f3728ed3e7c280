"""Fine-tunes of a model as PEFT makes and writes them, with weights that change its answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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
