"""Paged attention with one variable-length call for the whole step: CUDA, half precision."""

from __future__ import annotations

import inspect

import torch

from firsttoken.engine.attention import Attend, layer_steps
from firsttoken.engine.kv import KVPool
from firsttoken.engine.work import Work


class VarlenAttend(Attend):
    """Keys and values of all contexts are gathered end to end; nothing is padded.

    ``varlen_attn`` can read block tables itself, but only with FlashAttention 3. It takes fewer heads of keys than of
    queries where it has ``enable_gqa`` (torch 2.13); torch 2.11 wants as many, so there each head of keys is
    repeated.
    """

    def __init__(self, pool: KVPool, works: list[Work], blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        super().__init__(pool, blocks, offsets)
        from torch.nn.attention.varlen import varlen_attn

        self.groups_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters
        shape, device = pool.shape, pool.device
        new = torch.tensor([0] + [work.tokens for work in works])
        contexts = torch.tensor([0] + [work.end for work in works])
        self.longest = int(new.max()), int(contexts.max())
        self.ends = tuple(lengths.cumsum(0).to(device, torch.int32) for lengths in (new, contexts))
        keys = torch.cat([self._token_rows(work) for work in works]).to(device)
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
        ends, longest = self.ends, self.longest
        return varlen_attn(q, *both, *ends, *longest, scale=scaling, window_size=causal, **grouped)[None]

    def _token_rows(self, work: Work) -> torch.Tensor:
        """Rows of ``KVPool.token_rows`` of the keys in the first layer, of all that the request sees."""
        shape = self.pool.shape
        positions = torch.arange(work.end)
        blocks = torch.tensor(work.request.blocks)[positions // shape.block_tokens]
        return blocks * (shape.layers * 2 * shape.block_tokens) + positions % shape.block_tokens
