"""Paged attention with stock SDPA, on any device: the reference; and which way is the fastest here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firsttoken.engine.accelerator import accelerator
from firsttoken.engine.attention import Attend, VarlenAttend, layer_steps
from firsttoken.engine.kv import KVPool
from firsttoken.engine.request import ScheduledChunk


@dataclass(frozen=True)
class _Prefill:
    """Tokens ``start`` to ``end`` of the step, the first at ``position`` of its request; ``reads`` [layers, 2 * blocks]
    and ``mask`` where some are cached."""

    start: int
    end: int
    position: int
    reads: torch.Tensor | None
    mask: torch.Tensor | None


class PaddedAttend(Attend):
    """``chunks`` in the order of the step's tokens, the shorter ones first.

    Decodes share one call, padded to the longest context; query heads of one KV head are packed into the query axis, so
    keys and values are never repeated. Each prefill has a call of its own.
    """

    together = 1  # chunks of at most so many tokens share one call
    has_windows = True

    def __init__(self, pool: KVPool, chunks: list[ScheduledChunk], blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        super().__init__(pool, blocks, offsets)
        few = sum(chunk.tokens <= self.together for chunk in chunks)
        if few:
            self._plan(chunks[:few])
        self.shared = start = sum(chunk.tokens for chunk in chunks[:few])
        self.prefills: list[_Prefill] = []
        for chunk in chunks[few:]:
            self.prefills.append(self._plan_prefill(chunk, start))
            start += chunk.tokens

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None = None,
    ) -> torch.Tensor:
        _, heads, tokens, width = query.shape
        scaling = width**-0.5 if scaling is None else scaling
        if self.shared == tokens:
            return self._attend(layer, query[0].transpose(0, 1), scaling, window)[None]
        out = query.new_empty(tokens, heads, width)
        if self.shared:
            out[: self.shared] = self._attend(layer, query[0, :, : self.shared].transpose(0, 1), scaling, window)
        for part in self.prefills:
            new = slice(part.start, part.end)
            q, k, v, mask = query[:, :, new], key[:, :, new], value[:, :, new], part.mask
            if mask is not None:
                k, v = (half[:, :, : mask.shape[-1]] for half in self._read(part.reads[layer], 1))
            positions = torch.arange(part.position, part.position + q.shape[2], device=q.device)
            mask = self._windowed(mask, positions[:, None], window)
            grouped = heads > self.pool.shape.kv_heads
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
            out[new] = attended[0].transpose(0, 1)
        return out[None]

    def _attend(self, layer: int, query: torch.Tensor, scaling: float, window: int | None = None) -> torch.Tensor:
        """Attend from the shared tokens to what they see: ``query`` [tokens, heads, head_dim] -> the same shape."""
        requests, heads, width = query.shape
        keys, values = self._read(self.reads[layer], requests)
        keys[self.stale] = values[self.stale] = 0
        packed = query.reshape(requests, self.pool.shape.kv_heads, -1, width)
        mask = self._windowed(self.mask, self.positions, window)
        attended = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
        return attended.reshape(requests, heads, width)

    def _windowed(self, mask: torch.Tensor | None, positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """``mask``, in which what lies ``window`` tokens and more behind ``positions`` [tokens, 1] is hidden, too; None
        where each token sees all before it."""
        width = len(positions) if mask is None else mask.shape[-1]
        if window is None or width <= window:
            return mask
        columns = torch.arange(width, device=positions.device)
        hidden = columns <= positions - window
        if mask is None:  # nothing is cached
            mask, hidden = torch.zeros(width, width, dtype=self.pool.shape.dtype), hidden | (columns > positions)
        return mask.to(hidden.device).masked_fill(hidden, float("-inf"))

    def _read(self, rows: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [requests, kv_heads, context, head_dim] of block rows [requests * 2 * blocks]."""
        shape = self.pool.shape
        both = self.pool.block_rows.index_select(0, rows)
        both = both.view(requests, 2, -1, shape.kv_heads, shape.head_dim)
        return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)

    def _plan(self, chunks: list[ScheduledChunk]) -> None:
        """Lay out the shared chunks: padded block tables, and a mask that hides what is no context."""
        shape, device = self.pool.shape, self.pool.device
        contexts = torch.tensor([chunk.end for chunk in chunks])
        width = shape.blocks(int(contexts.max()))
        tables = []
        for chunk in chunks:  # each filled up with the request's first block, which it has written
            blocks = chunk.request.blocks[: shape.blocks(chunk.end)]
            tables.append(blocks + blocks[:1] * (width - len(blocks)))
        self.reads = self._rows(torch.tensor(tables))
        columns, context_ends = torch.arange(width * shape.block_tokens), contexts[:, None]
        hidden = columns >= context_ends
        # the rest of a last block holds what its owner before left there: of what is no number a share of 0 is none
        rest = columns < -(-context_ends // shape.block_tokens) * shape.block_tokens
        rows, columns = (hidden & (rest | (context_ends < shape.block_tokens))).nonzero(as_tuple=True)
        self.stale = rows.to(device), slice(None), columns.to(device)
        mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, float("-inf"))
        self.mask = mask[:, None, None].to(device)
        self.positions = (contexts - 1)[:, None, None, None].to(device)

    def _plan_prefill(self, chunk: ScheduledChunk, start: int) -> _Prefill:
        end = start + chunk.tokens
        if not chunk.start:
            return _Prefill(start, end, 0, None, None)
        shape = self.pool.shape
        table = torch.tensor([chunk.request.blocks[: shape.blocks(chunk.end)]])
        hidden = torch.arange(chunk.end) > torch.arange(chunk.start, chunk.end)[:, None]
        mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, float("-inf"))
        return _Prefill(start, end, chunk.start, self._rows(table), mask.to(self.pool.device))

    def _rows(self, tables: torch.Tensor) -> torch.Tensor:
        """Block tables [requests, blocks] as rows of ``KVPool.block_rows`` [layers, requests * 2 * blocks]."""
        keys = (tables * (self.pool.shape.layers * 2)).to(self.pool.device)
        return torch.stack([keys, keys + 1], 1).flatten() + layer_steps(self.pool, 2)


def fastest_attend(pool: KVPool) -> type[Attend]:
    """The way to compute attention over ``pool`` that is fastest here."""
    if pool.device.type == "cuda" and pool.shape.dtype in (torch.float16, torch.bfloat16):
        return VarlenAttend
    return accelerator().attention(pool) or PaddedAttend
