"""The costs of swap and recompute on other links and models: Table 2's prices, and arithmetic for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from firsttoken.engine.kv import KVShape
from firsttoken.simulation.costs.published import PAPER_SHAPE, PREFILL_FIXED_S, decomposed

PREFILL_FLOP_PER_S = 95e12  # what Table 2's recompute column amounts to (``PublishedCosts``), of the A6000's 155e12


@dataclass(frozen=True)
class LinkModel:
    """A model on the paper's GPU behind a link of ``bytes_per_s``; 16-bit keys and values, blocks of 16 tokens.

    A pass costs what the paper's does as such, in proportion to layers, and its products and attention at the paper's
    rate. A copy costs what it does in Table 2 beyond its bytes; ``coalesced`` makes one each way.
    """

    config: PretrainedConfig
    bytes_per_s: float
    coalesced: bool = False

    def recompute_s(self, tokens: int) -> float:
        """Return the seconds of a prefill of ``tokens`` tokens."""
        config, shape = self.config, KVShape.of(self.config, torch.float16)
        wide = config.num_attention_heads * shape.head_dim
        attention = config.hidden_size * (2 * wide + 2 * shape.kv_heads * shape.head_dim)
        a_layer = 2 * tokens * (attention + 3 * config.hidden_size * config.intermediate_size) + 2 * wide * tokens**2
        fixed_s = PREFILL_FIXED_S * shape.layers / PAPER_SHAPE.layers
        return fixed_s + shape.layers * a_layer / PREFILL_FLOP_PER_S

    def swap_s(self, tokens: int) -> float:
        """Return the seconds that it takes to swap ``tokens`` tokens out and in again."""
        shape, parts = KVShape.of(self.config, torch.float16), decomposed(1024)
        copies = 1 if self.coalesced else shape.copies(tokens)
        per_copies_s = copies * (parts.out_us_per_copy + parts.in_us_per_copy) / 1e6
        return per_copies_s + 2 * shape.bytes_per_token * tokens / self.bytes_per_s
