"""The costs of a swap with larger copies: a price for each copy, and a rate for the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.kv import KVShape
from firsttoken.study.errors import ProfileError


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
