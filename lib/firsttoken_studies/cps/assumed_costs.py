"""Costs of swaps and recomputes that were not measured: other copies, links and models, and changes during a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.kv import KVShape
from firsttoken.simulation.costs.published import PAPER_SHAPE, PREFILL_FIXED_S, decomposed
from firsttoken.study.errors import ProfileError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PREFILL_FLOP_PER_S = 95e12  # what Table 2's recompute column amounts to (``PublishedCosts``), of the A6000's 155e12


@dataclass(frozen=True)
class CopyCosts(Costs):
    """The steps of ``costs``, with swaps of ``copy_s`` for each copy and ``bytes_per_s`` for the bytes, either way.

    ``coalesced`` makes one copy a request out of the ``shape.copies(tokens)`` that vLLM 0.2.4 makes.
    """

    costs: Costs
    shape: KVShape
    copy_s: float
    bytes_per_s: float
    coalesced: bool = False

    def __post_init__(self) -> None:
        if self.copy_s < 0 or self.bytes_per_s <= 0:
            raise ProfileError(
                f"copy costs: copy_s {self.copy_s} must be 0 or more, bytes_per_s {self.bytes_per_s} above 0"
            )

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        return self.costs.step_s(prefills, contexts)

    def swap_out_s(self, tokens: int) -> float:
        copies = 1 if self.coalesced else self.shape.copies(tokens)
        return copies * self.copy_s + self.shape.blocks(tokens) * self.shape.block_bytes / self.bytes_per_s

    swap_in_s = swap_out_s


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


@dataclass(frozen=True)
class ScaledCosts(Costs):
    """Costs whose swaps take ``swap`` times as long as ``costs`` say, as over a slower link, and whose steps take
    ``compute`` times as long, as those of a larger model or a busier device."""

    costs: Costs
    swap: float = 1.0
    compute: float = 1.0

    def __post_init__(self) -> None:
        if self.swap <= 0 or self.compute <= 0:
            raise ProfileError(f"scaled costs: factors must be above 0, not swap {self.swap}, compute {self.compute}")

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        return self.compute * self.costs.step_s(prefills, contexts)

    def swap_out_s(self, tokens: int) -> float:
        return self.swap * self.costs.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        return self.swap * self.costs.swap_in_s(tokens)


@dataclass(frozen=True)
class Drift:
    """Costs that change over time: ``changes`` are (seconds since the start, costs), the first at 0, increasing."""

    changes: tuple[tuple[float, Costs], ...]

    def __post_init__(self) -> None:
        starts = [from_s for from_s, _ in self.changes]
        if not starts or starts[0] != 0:
            raise ProfileError(f"drift: the first costs must hold from 0 s; the changes are at {starts} s")
        if any(later <= earlier for earlier, later in pairwise(starts)):
            raise ProfileError(f"drift: changes must come one after the other, not at {starts} s")

    def at(self, now_s: float) -> Costs:
        """The costs that hold at ``now_s``; before 0 s those of the start."""
        return self.changes[max(0, bisect_right(self.changes, now_s, key=lambda change: change[0]) - 1)][1]
