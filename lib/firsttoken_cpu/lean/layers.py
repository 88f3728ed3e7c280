"""The parts of a Llama or Qwen2 layer, operation by operation as transformers 5 has it, under the same names.

So an engine fuses, adapts and replaces these as it does the stock modules, and the tests hold the two bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from firsttoken_cpu.lean.lean_config import LeanConfig, scaled_frequencies

Attention = Callable[..., tuple[Tensor, None]]


def sdpa(
    module: LeanAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """``query`` [batch, heads, tokens, head_dim], ``key`` and ``value`` [batch, kv_heads, context, head_dim] ->
    [batch, tokens, heads, head_dim]; causal where more than one token has no mask."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and attention_mask is not None:  # a mask and shared heads together leave the fast kernel on CUDA
        key, value = (half.repeat_interleave(query.shape[1] // half.shape[1], 1) for half in (key, value))
        grouped = False
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None and query.shape[2] > 1,
        enable_gqa=grouped,
    )
    return attended.transpose(1, 2).contiguous(), None


INTERFACES: dict[str, Attention] = {"sdpa": sdpa}
"""Attention by name, as transformers' ``AttentionInterface``: a paged engine adds its own."""


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in fp32 (Zhang and Sennrich, NeurIPS 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, states: Tensor) -> Tensor:
        """Normalize ``states`` [..., size] -> the same shape."""
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(states.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary positions (Su et al., 2021), their frequencies scaled as ``Rotary`` says."""

    def __init__(self, config: LeanConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(config), persistent=False)

    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``position_ids`` [batch, tokens] -> both [batch, tokens, head_dim] in the dtype of ``states``."""
        angles = position_ids[..., None].float() * self.inv_freq.to(states.device, torch.float)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(states.dtype), both.sin().to(states.dtype)


def frequencies(config: LeanConfig) -> Tensor:
    """Return the rotary frequencies [head_dim / 2] in fp32 on the CPU, in radians a token."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float, device="cpu") / config.head_dim
    return scaled_frequencies(config, steps, torch.where)


class LeanAttention(nn.Module):
    """Grouped-query attention with rotary position embeddings (Llama and Qwen2)."""

    def __init__(self, config: LeanConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling = self.head_dim**-0.5
        width, bias = config.hidden_size, config.attention_bias
        heads, kv_heads = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, width, bias=config.output_bias)

    @property
    def interface(self) -> Attention:
        """Return the attention function in use now."""
        return INTERFACES[self.config._attn_implementation]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **keywords: Any,
    ) -> Tensor:
        """Attend: [batch, tokens, hidden] -> the same shape."""
        batch, tokens, _ = hidden_states.shape
        query, key, value = (
            linear(hidden_states).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (half.unsqueeze(1) for half in position_embeddings)
        query, key = (states * cos + _rotate_half(states) * sin for states in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attended, _ = self.interface(self, query, key, value, attention_mask, scaling=self.scaling, **keywords)
        return self.o_proj(attended.reshape(batch, tokens, -1))


def _rotate_half(states: Tensor) -> Tensor:
    low, high = states.chunk(2, -1)
    return torch.cat((-high, low), dim=-1)


class LeanMLP(nn.Module):
    """The gated feed-forward layer: down(silu(gate) * up) (Shazeer, 2020)."""

    def __init__(self, config: LeanConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, states: Tensor) -> Tensor:
        """Apply the layer to ``states`` [..., hidden] -> the same shape."""
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class LeanLayer(nn.Module):
    """One decoder layer: attention and feed-forward, each behind its norm and with a residual."""

    def __init__(self, config: LeanConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LeanAttention(config, layer_idx)
        self.mlp = LeanMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        """Run the layer: [batch, tokens, hidden] -> the same shape."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **keywords)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
