"""What a sender leaves behind for one prefix: every layer's KV cache, and the hidden states at some layer edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from firsttoken.study.errors import RequestError


class LayerKV(NamedTuple):
    """Keys (rotated) and values of one layer, each [batch, kv_heads, tokens, head_dim]."""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class Prefix:
    """Token ids [batch, tokens] that several models read; ``mask`` [batch, tokens] is 0 where a row is padded.

    Rows are padded on the left, so that what follows the prefix stands beside it in every row.
    """

    ids: Tensor
    mask: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Prefix:
        """Rows of token ids, padded on the left where they differ in length. Raises RequestError for an empty row."""
        if not rows or not all(rows):
            raise RequestError("a prefix needs at least one token in every row")
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
        if all(len(row) == width for row in rows):
            return cls(ids)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        return cls(ids, mask)

    @property
    def tokens(self) -> int:
        """Return the number of columns, padding included."""
        return self.ids.shape[1]

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its row, [batch, tokens]; padding stands at 0."""
        if self.mask is None:
            return torch.arange(self.tokens, device=self.ids.device).expand(self.ids.shape[0], -1)
        return (self.mask.cumsum(1) - 1).clamp(min=0)

    def followed_by(self, ids: Tensor, mask: Tensor | None = None) -> Prefix:
        """This prefix with ``ids`` [batch, more] behind it; ``mask`` is 0 where those are padding on their right."""
        joined = torch.cat([self.ids, ids], 1)
        if self.mask is None and mask is None:
            return Prefix(joined)
        own_mask = torch.ones_like(self.ids) if self.mask is None else self.mask
        return Prefix(joined, torch.cat([own_mask, torch.ones_like(ids) if mask is None else mask], 1))

    def rows(self, which: Tensor) -> Prefix:
        """The rows ``which`` (indices, one may come twice) of this prefix."""
        return Prefix(self.ids[which], None if self.mask is None else self.mask[which])


@dataclass(frozen=True)
class PrefixCache:
    """A prefix as one model has computed it.

    ``kv`` has one entry a layer; ``e_cache`` maps a layer to its E-cache, the hidden states [batch, tokens, hidden]
    that enter it (DroidSpeak, 4.1).
    """

    kv: tuple[LayerKV, ...]
    e_cache: Mapping[int, Tensor]
