"""Attention over the paged pool, given to unmodified models through their ``AttentionInterface``, and to lean ones.

A model that runs with ``set_attn_implementation(NAME)`` passes the extra keyword ``paged`` down to every layer. It is
the step's ``Attend``, which writes the new keys and values into the pool and reads what each request sees.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import nn

from firsttoken.engine.kv import KVPool
from firsttoken.engine.request import ScheduledChunk
from firsttoken.study.errors import ModelError

NAME = "firsttoken_paged"
_WITHOUT_EFFECT = (
    "dropout",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_router_logits",
)
_CACHE_LAYER = "_firsttoken_cache_layer"


class Attend(ABC):
    """One step's reads and writes. ``writes`` [layers, 2 * tokens] are rows of ``KVPool.token_rows``: keys, values.

    Where it ``has_windows``, a layer may let a token see so many tokens only, itself among them.
    """

    has_windows = False

    def __init__(self, pool: KVPool, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Set up the step: ``blocks`` and ``offsets`` [tokens] say where in the pool each new token belongs."""
        self.pool = pool
        self._blocks, self._offsets = blocks, offsets

    @cached_property
    def writes(self) -> torch.Tensor:
        """The rows of each layer for the new keys and values, made when a layer first asks."""
        shape = self.pool.shape
        keys = self._blocks * (shape.layers * 2 * shape.block_tokens) + self._offsets
        first = torch.cat([keys, keys + shape.block_tokens])
        return first + layer_steps(self.pool, 2 * shape.block_tokens)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend with ``query`` [1, heads, tokens, head_dim], ``key``, ``value`` [1, kv_heads, ...] -> [1, tokens,
        heads, ...]."""
        new = torch.cat([key[0].transpose(0, 1), value[0].transpose(0, 1)]).flatten(1)
        self.pool.token_rows.index_copy_(0, self.writes[layer], new)
        windowed = {} if window is None else {"window": window}
        return self.attend(layer, query, key, value, scaling, **windowed)

    def read_by_kernels(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The block tables, chunks and contexts of all ``tokens`` of the step, as ``Kernels.attend`` takes them;
        None where something else reads some of them."""
        return None

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Return what ``__call__`` returns; the new keys and values are in the pool already."""


def layer_steps(pool: KVPool, rows: int) -> torch.Tensor:
    """Return how far the rows of each layer lie behind those of the first [layers, 1]; a block has ``rows`` in each."""
    return (torch.arange(pool.shape.layers, device=pool.device) * rows)[:, None]


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    sliding_window: int | None = None,
    paged: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that every layer calls. Raises ModelError when ``paged`` did not come through, and for a layer whose
    attention is more than this one: with a mask of its own, or a keyword that is not known to be without effect."""
    keywords = {"attention_mask": attention_mask} | others
    if more := [name for name, value in keywords.items() if value is not None and name not in _WITHOUT_EFFECT]:
        raise ModelError(f"{type(module).__name__} asks its attention for {more[0]}, which the engine's does not have")
    if paged is None:
        raise ModelError(
            f"{type(module).__name__} was called without an engine's step: close the engine to use the model itself,"
            " or take a model whose layers pass keywords on"
        )
    return paged(cache_layer(module), query, key, value, scaling, sliding_window), None


def cache_layer(module: nn.Module) -> int:
    """The layer of the pool that has the keys and values of an attention ``module``: its own number, unless
    :func:`use_paged_attention` was told of another."""
    return getattr(module, _CACHE_LAYER, module.layer_idx)


def is_stock(model: nn.Module) -> bool:
    """Return whether the modules of ``model`` are transformers' own. Others have ``attention_interfaces`` by name."""
    return not hasattr(model, "attention_interfaces")


def use_paged_attention(model: nn.Module, first: int = 0) -> None:
    """Let the layers of ``model``, stock or not, call :func:`paged_attention`; the pool begins with the layer of the
    number ``first``."""
    for module in model.modules() if first else ():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _CACHE_LAYER, module.layer_idx - first)
    if is_stock(model):
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, paged_attention)
    else:
        model.attention_interfaces[NAME] = paged_attention
    model.set_attn_implementation(NAME)


# Paged attention with one variable-length call for the whole step: CUDA, half precision.


class VarlenAttend(Attend):
    """Keys and values of all contexts are gathered end to end; nothing is padded.

    ``varlen_attn`` can read block tables itself, but only with FlashAttention 3. It takes fewer heads of keys than of
    queries where it has ``enable_gqa`` (torch 2.13); torch 2.11 wants as many, so there each head of keys is
    repeated.
    """

    def __init__(self, pool: KVPool, chunks: list[ScheduledChunk], blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        super().__init__(pool, blocks, offsets)
        from torch.nn.attention.varlen import varlen_attn

        self.groups_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters
        shape, device = pool.shape, pool.device
        new = torch.tensor([0] + [chunk.tokens for chunk in chunks])
        contexts = torch.tensor([0] + [chunk.end for chunk in chunks])
        self.longest = int(new.max()), int(contexts.max())
        self.ends = tuple(lengths.cumsum(0).to(device, torch.int32) for lengths in (new, contexts))
        keys = torch.cat([self._token_rows(chunk) for chunk in chunks]).to(device)
        self.reads = torch.cat([keys, keys + shape.block_tokens]) + layer_steps(pool, 2 * shape.block_tokens)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        shape = self.pool.shape
        both = self.pool.token_rows.index_select(0, self.reads[layer]).view(2, -1, shape.kv_heads, shape.head_dim)
        q = query[0].transpose(0, 1).contiguous()
        grouped = {}
        if (queries_a_key := query.shape[1] // shape.kv_heads) > 1:
            if self.groups_heads:
                grouped = {"enable_gqa": True}
            else:
                both = both.repeat_interleave(queries_a_key, 2)
        causal = (-1, 0)
        sequence_ends, longest = self.ends, self.longest
        return varlen_attn(q, *both, *sequence_ends, *longest, scale=scaling, window_size=causal, **grouped)[None]

    def _token_rows(self, chunk: ScheduledChunk) -> torch.Tensor:
        """Rows of ``KVPool.token_rows`` of the keys in the first layer, of all that the request sees."""
        shape = self.pool.shape
        positions = torch.arange(chunk.end)
        blocks = torch.tensor(chunk.request.blocks)[positions // shape.block_tokens]
        return blocks * (shape.layers * 2 * shape.block_tokens) + positions % shape.block_tokens
