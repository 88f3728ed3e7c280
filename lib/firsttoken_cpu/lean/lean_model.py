"""A causal language model of lean layers, called as transformers' are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firsttoken.assets.empty_model import on_meta
from firsttoken_cpu.lean.layers import INTERFACES, LeanLayer, RMSNorm, RotaryEmbedding
from firsttoken_cpu.lean.lean_config import LeanConfig, lean_config


class LeanOutput(NamedTuple):
    """``logits`` [batch, tokens kept, vocabulary], and the keys and values if they were kept."""

    logits: Tensor
    past_key_values: Any


class LeanCache:
    """Keys and values by layer; one that passes leaves a gap."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Add [batch, kv_heads, tokens, head_dim] to a layer; return all that the layer has then."""
        if (held := self._held.get(layer)) is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(held, (key, value), strict=True))
        self._held[layer] = key, value
        return key, value

    def get_seq_length(self) -> int:
        """Return the number of tokens whose keys and values are held."""
        return next((key.shape[2] for key, _ in self._held.values()), 0)


class LeanDecoder(nn.Module):
    """A decoder without its head: embedding, layers and final norm."""

    def __init__(self, config: LeanConfig) -> None:
        super().__init__()
        self.config = config
        # not its constructor: to draw normals on the meta device, torch imports its compiler and sympy (2.5 s)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(LeanLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, past_key_values: Any = None, **keywords: Any
    ) -> Tensor:
        """``input_ids`` [batch, tokens] -> hidden states [batch, tokens, hidden] after the norm."""
        hidden = self.embed_tokens(input_ids)
        before, tokens = past_key_values.get_seq_length() if past_key_values is not None else 0, input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(before, before + tokens, device=hidden.device)[None]
        mask = None
        if before and tokens > 1:
            rows = torch.arange(before, before + tokens, device=hidden.device)[:, None]
            mask = (torch.arange(before + tokens, device=hidden.device) <= rows)[None, None]
        places = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=mask, position_embeddings=places, past_key_values=past_key_values, **keywords
            )
        return self.norm(hidden)


class LeanModel(nn.Module):
    """A decoder and its head: Llama's and Qwen2's shapes, for inference alone.

    ``forward`` takes what the engine and a prefill give it; there is no padding, no training, and no ``generate``.
    """

    attention_interfaces = INTERFACES

    def __init__(self, config: LeanConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LeanDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_decoder(self) -> LeanDecoder:
        """Return the decoder, all but the head."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        """Attend with ``INTERFACES[name]``. Raises KeyError for a name that is none."""
        INTERFACES[name]
        self.config._attn_implementation = name

    def tie_weights(self) -> None:
        """Set the head's weight to the embedding's, where the model has them tied."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        **keywords: Any,
    ) -> LeanOutput:
        """Compute the logits of ``input_ids`` [batch, tokens]; ``logits_to_keep`` counts from the end (0: all) or names
        the tokens."""
        if use_cache and past_key_values is None:
            past_key_values = LeanCache()
        hidden = self.model(input_ids, past_key_values=past_key_values, **keywords)
        rows = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        wanted = hidden[:, rows]
        # One row that is cut out of many has strides that torch 2.13 multiplies by another way, on two cores a head of
        # 49,152 x 576 in bf16 in 39 ms; as a row of a matrix it takes 2.
        logits = self.lm_head(wanted.flatten(0, 1))
        return LeanOutput(logits.view(*wanted.shape[:2], -1), past_key_values)


def lean_on_meta(folder: Path, dtype: torch.dtype) -> LeanModel:
    """The lean model that ``folder/config.json`` describes: parameters on the meta device in ``dtype``, rotary tables
    real. Raises NotLean and ModelError as :func:`lean_config`."""
    return empty_lean(lean_config(folder), dtype)


def empty_lean(config: LeanConfig, dtype: torch.dtype) -> LeanModel:
    """A model of ``config`` in eval mode, as :func:`lean_on_meta` makes it."""
    with on_meta(dtype):
        model = LeanModel(config)
    model.model.rotary_emb = RotaryEmbedding(config)
    return model.eval().requires_grad_(False)
