"""What a client trains: a prompt before every other, LoRA in the servers' blocks; both saved as stock PEFT folders."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from firsttoken.assets.adapter_files import CONFIG, RECIPE, WEIGHTS
from firsttoken.petals.tuning.passes import Adapters
from firsttoken.study.errors import SwarmError
from firsttoken.study.files import write_text

_PREFIX = "base_model.model.model.layers"


class SoftPrompt(nn.Module):
    """``tokens`` rows of the model's width, before each row of a batch; PEFT's prompt tuning."""

    def __init__(self, config: PretrainedConfig, tokens: int, seed: int = 0) -> None:
        super().__init__()
        self._config = config
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(0.02 * torch.randn(tokens, config.hidden_size, generator=draw))

    def save(self, folder: Path, model: str) -> None:
        """Write a folder that ``PeftModel.from_pretrained`` loads; ``model`` is the base's sha256."""
        config = self._config
        fields = {
            "peft_type": "PROMPT_TUNING",
            "prompt_tuning_init": "RANDOM",
            "num_virtual_tokens": len(self.weight),
            "token_dim": config.hidden_size,
            "num_transformer_submodules": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_layers": config.num_hidden_layers,
        }
        _write(folder, fields, {"prompt_embeddings": self.weight}, model)


class Lora(nn.Module):
    """LoRA of ``rank`` and ``alpha`` beside the linear ``modules`` of every layer (names within a layer, such as
    self_attn.q_proj, with their widths in and out); at first it changes nothing. Raises SwarmError for none."""

    def __init__(
        self,
        config: PretrainedConfig,
        rank: int = 8,
        alpha: float = 16.0,
        modules: Sequence[str] = ("self_attn.q_proj", "self_attn.v_proj"),
        seed: int = 0,
    ) -> None:
        super().__init__()
        widths = module_widths(config)
        if unknown_modules := [name for name in modules if name not in widths]:
            raise SwarmError(f"LoRA can be added to {', '.join(widths)}, not to {unknown_modules[0]}")
        if rank < 1 or not modules:
            raise SwarmError("LoRA needs a rank of 1 or more, and one module or more")
        self.rank, self.alpha, self.modules_of_a_layer = rank, alpha, tuple(modules)
        draw = torch.Generator().manual_seed(seed)
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        self.places = [(layer, name) for layer in range(config.num_hidden_layers) for name in modules]
        for layer, name in self.places:
            inner, outer = widths[name]
            half = (2 * torch.rand(rank, inner, generator=draw) - 1) / math.sqrt(inner)
            self.a[_key(layer, name)] = nn.Parameter(half)
            self.b[_key(layer, name)] = nn.Parameter(torch.zeros(outer, rank))

    @property
    def scaling(self) -> float:
        """Return the factor on the product of both halves."""
        return self.alpha / self.rank

    def adapters(self) -> Adapters:
        """The halves by layer and module."""
        return {key: (self.a[_key(*key)], self.b[_key(*key)]) for key in self.places}

    def save(self, folder: Path, model: str) -> None:
        """Write a folder for ``PeftModel.from_pretrained``, as SoftPrompt does; ``model`` is the base's sha256."""
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(name.rpartition(".")[2] for name in self.modules_of_a_layer),
        }
        tensors = {}
        for (layer, name), (a, b) in self.adapters().items():
            tensors |= {f"{_PREFIX}.{layer}.{name}.lora_{half}.weight": tensor for half, tensor in (("A", a), ("B", b))}
        _write(folder, config, tensors, model)


def module_widths(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """The linear modules of a Llama-like layer, with what goes in and comes out."""
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "self_attn.q_proj": (width, queries),
        "self_attn.k_proj": (width, keys),
        "self_attn.v_proj": (width, keys),
        "self_attn.o_proj": (queries, width),
        "mlp.gate_proj": (width, inner),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }


def _key(layer: int, name: str) -> str:
    return f"{layer}/{name.replace('.', '/')}"


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], model: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"task_type": "CAUSAL_LM", "inference_mode": True, "base_model_name_or_path": None} | config
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"}
    )
    write_text(folder / CONFIG, json.dumps(config, indent=1, sort_keys=True) + "\n")
    write_text(folder / RECIPE, json.dumps({"base_sha256": model}, indent=1) + "\n")
