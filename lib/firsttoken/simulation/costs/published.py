"""The costs that the paper published: Table 2 of CPS (RTX A6000, Qwen2.5-0.5B, vLLM 0.2.4), and its link arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.kv import KVShape
from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class Table2Row:
    """One line of Table 2, in milliseconds as printed; ``swap_ms`` is the printed total, rounded by its authors."""

    tokens: int
    out_ms: float
    prep_ms: float
    in_ms: float
    swap_ms: float
    recompute_ms: float


TABLE_2 = (
    Table2Row(512, 3.236, 0.034, 3.366, 6.64, 8.30),
    Table2Row(1024, 6.257, 0.050, 6.379, 12.69, 12.30),
    Table2Row(2048, 17.795, 0.084, 18.411, 36.29, 22.73),
    Table2Row(4096, 34.632, 0.151, 36.658, 71.44, 42.90),
    Table2Row(8192, 68.939, 0.281, 72.574, 141.80, 97.60),
)
PAPER_SHAPE = KVShape(layers=24, kv_heads=2, head_dim=64, dtype=torch.float16)
"""Qwen2.5-0.5B: 12,288 bytes a token, copies of 4 KiB, 3,072 copies for 1,024 tokens one way (16-token blocks assumed:
the paper gives none, errata I19)."""

_TOKENS = tuple(row.tokens for row in TABLE_2)
_OUT = tuple(row.out_ms / 1e3 for row in TABLE_2)
_PREP = tuple(row.prep_ms / 1e3 for row in TABLE_2)
_IN = tuple(row.in_ms / 1e3 for row in TABLE_2)
_RECOMPUTE = tuple(row.recompute_ms / 1e3 for row in TABLE_2)


def _line(column: Sequence[float], tokens: int) -> float:
    """A column [5] at ``tokens``: straight between the points, the outer segments going on beyond them."""
    index = min(max(bisect_left(_TOKENS, tokens) - 1, 0), len(_TOKENS) - 2)
    share = (tokens - _TOKENS[index]) / (_TOKENS[index + 1] - _TOKENS[index])
    return column[index] + share * (column[index + 1] - column[index])


def _proportional(column: Sequence[float], tokens: int) -> float:
    """``_line``, but through the origin below the first point."""
    return column[0] * tokens / _TOKENS[0] if tokens < _TOKENS[0] else _line(column, tokens)


PREFILL_FIXED_S = _line(_RECOMPUTE, 0)
"""4.3 ms: where the first segment of the recompute column meets 0 tokens, taken as the price of a pass as such."""


@dataclass(frozen=True)
class PublishedCosts(Costs):
    """Table 2 between its points; the price of a decode step, which the paper does not publish, is a parameter.

    ``decode_s`` is a step that decodes. Between the points of the table every
    column is a straight line, above 8,192 tokens the last segment goes on. Below 512 swap is proportional to tokens
    (it is copies, and they are), its prep and recompute follow their first segments: recompute ends at
    ``PREFILL_FIXED_S``, since a pass over few tokens still launches every kernel and reads every weight.

    Prompts in one step pay that fixed part once, and each its own tokens along the column; a continued prefill pays
    cost(cached + new) - cost(cached). The sum of the prompts' tokens would charge attention between prompts, and there
    is none: the column steepens x1.36 above 4,096 tokens where attention's arithmetic predicts x1.27 (0.72 GFLOP a
    token and 86 kFLOP a pair). Eight prompts of 512 cost 36.3 ms so; the column's 42.9 ms for 4,096 less the pairs
    across prompts, at the 95 TFLOP/s that the column amounts to, 36.2. A step that also decodes is still one pass and
    pays the larger of the two fixed parts (vLLM 0.2.4 never mixes, so Table 2 says nothing about it).
    """

    decode_s: float

    def __post_init__(self) -> None:
        if self.decode_s < 0:
            raise ProfileError(f"published costs: decode_s must be 0 or more, not {self.decode_s}")

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        fixed = max(PREFILL_FIXED_S if prefills else 0.0, self.decode_s if contexts else 0.0)
        marginal = sum(_line(_RECOMPUTE, cached + new) - _line(_RECOMPUTE, cached) for cached, new in prefills)
        return fixed + marginal

    def swap_out_s(self, tokens: int) -> float:
        return _proportional(_OUT, tokens)

    def swap_in_s(self, tokens: int) -> float:
        return _line(_PREP, tokens) + _proportional(_IN, tokens)


@dataclass(frozen=True)
class Decomposed:
    """One way of a published swap taken apart: ``wire_s`` for the bytes, the rest shared out over the copies."""

    tokens: int
    copies: int
    wire_s: float
    out_us_per_copy: float
    in_us_per_copy: float


def decomposed(tokens: int, bytes_per_s: float = 25e9) -> Decomposed:
    """Split the cost of a copy into its bytes and the rest, if the link moves ``bytes_per_s`` (PCIe 4.0 x16 in
    practice: about 25 GB/s).

    The rate has to be assumed. Bytes and copies are both proportional to tokens, so no regression over Table 2 can tell
    their prices apart. Raises ProfileError for a rate at which the bytes alone would take longer than was measured.
    """
    copies = PAPER_SHAPE.copies(tokens)
    wire_s = copies * PAPER_SHAPE.copy_bytes / bytes_per_s
    out_s, in_s = _proportional(_OUT, tokens), _proportional(_IN, tokens)
    if wire_s > min(out_s, in_s):
        raise ProfileError(f"{tokens} tokens at {bytes_per_s:.3g} B/s take longer than Table 2 says; raise the rate")
    return Decomposed(tokens, copies, wire_s, *((way - wire_s) / copies * 1e6 for way in (out_s, in_s)))
