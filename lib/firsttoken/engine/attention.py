"""Attention over the paged pool, given to lean models, and to unmodified ones through their ``AttentionInterface``.

A model that runs with ``set_attn_implementation(NAME)`` passes the extra keyword ``paged`` down to every layer. It is
the step's ``Attend``, which writes the new keys and values into the pool and reads what each request sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from firsttoken.engine.kv import KVPool
from firsttoken.lean.layers import INTERFACES, LeanAttention
from firsttoken.lean.model import LeanModel
from firsttoken.study.errors import ModelError

NAME = "firsttoken_paged"


class Attend(ABC):
    """One step's reads and writes. ``writes`` [layers, 2 * tokens] are rows of ``KVPool.token_rows``: keys, values."""

    def __init__(self, pool: KVPool, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """``blocks`` and ``offsets`` [tokens] say where in the pool each new token belongs."""
        self.pool = pool
        shape = pool.shape
        keys = blocks * (shape.layers * 2 * shape.block_tokens) + offsets
        first = torch.cat([keys, keys + shape.block_tokens])
        self.writes = first + layer_steps(pool, 2 * shape.block_tokens)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """``query`` [1, heads, tokens, head_dim], ``key``, ``value`` [1, kv_heads, ...] -> [1, tokens, heads, ...]."""
        new = torch.cat([key[0].transpose(0, 1), value[0].transpose(0, 1)]).flatten(1)
        self.pool.token_rows.index_copy_(0, self.writes[layer], new)
        return self.attend(layer, query, key, value, scaling)

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """As ``__call__``, once the new keys and values are in the pool."""


def layer_steps(pool: KVPool, rows: int) -> torch.Tensor:
    """[layers, 1]: how far the rows of each layer lie behind those of the first; a block has ``rows`` in each."""
    return (torch.arange(pool.shape.layers, device=pool.device) * rows)[:, None]


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    paged: Attend | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that every layer calls. Raises ModelError when ``paged`` did not come through."""
    if paged is None:
        raise ModelError(
            f"{type(module).__name__} was called without an engine's step: close the engine to use the model itself,"
            " or take a model whose layers pass keywords on"
        )
    return paged(module.layer_idx, query, key, value, scaling), None


INTERFACES[NAME] = paged_attention


def page(model: nn.Module) -> None:
    """Let the layers of ``model``, stock or lean, call :func:`paged_attention`."""
    if not isinstance(model, LeanModel):
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)


def interface(module: nn.Module) -> Callable[..., Any]:
    """What an attention module, stock or lean, calls now."""
    if isinstance(module, LeanAttention):
        return module.interface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager_attention_forward)
