"""Batch times that Sarathi-Serve's artifact published: Yi-34B on two A100 (osdi-sarathi-serve, figure-2, table-2)."""

from __future__ import annotations

from collections.abc import Sequence

from firsttoken.engine.costs.cost_model import Costs, follow, line_through
from firsttoken.study.errors import ProfileError

PREFILL_MS_PER_TOKEN = {
    128: 0.376,
    256: 0.474,
    512: 0.206,
    1024: 0.209,
    2048: 0.179,
    4096: 0.185,
    8192: 0.227,
    16384: 0.269,
}
DECODE_MS_PER_TOKEN = {1: 46.8, 2: 23.75, 4: 12.21, 8: 8.71, 16: 4.83, 32: 2.75, 64: 2.0, 128: 1.48}


class BatchCosts(Costs):
    """A step costs what a prefill of as many tokens did, and what decoding so many requests took beyond that.

    A mixed batch of 1,021 prompt tokens and 3 decodes took 217.6 ms there and a prefill of 1,024 tokens 217.2 (table
    2): the decodes ride along, so that their own part is what their batch took above a prefill as small. A prompt that
    goes on pays besides what it would have cost more in one piece. Straight lines between the points; beyond them the
    last segment goes on, below 128 tokens the time is that of 128, which the weights take to be read. The contexts
    behind the published decodes are not said, so that none is charged. 256 tokens took longer than 512 there; that is
    left as it is.
    """

    def __init__(self) -> None:
        prefills = {tokens: tokens * ms_per_unit for tokens, ms_per_unit in PREFILL_MS_PER_TOKEN.items()}
        decodes = {count: count * ms_per_unit for count, ms_per_unit in DECODE_MS_PER_TOKEN.items()}
        self._prefill, decode = line_through(prefills, 1 << 15), line_through(decodes, 1 << 10)
        self._prefill[0] = decode[0] = 0.0  # nothing takes no time
        self._decode = [max(total - prompt, 0.0) for total, prompt in zip(decode, self._prefill, strict=False)]

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        tokens = sum(new for _, new in prefills) + len(contexts)
        if not tokens:
            return 0.0
        batch = follow(self._prefill, tokens) + follow(self._decode, len(contexts))
        for cached, new in prefills:
            behind = follow(self._prefill, cached + new) - follow(self._prefill, cached)
            batch += max(0.0, behind - follow(self._prefill, new)) if cached else 0.0
        return batch / 1e3

    def swap_out_s(self, tokens: int) -> float:
        raise ProfileError("batch costs: the artifact holds no price of a swap; preempt by recompute")

    swap_in_s = swap_out_s
