"""The theory that the paper argues against (2.3): data divided by bandwidth, arithmetic divided by its rate."""

from __future__ import annotations

from firsttoken.engine.preemption.preemption_policy import Action, PreemptionPolicy
from firsttoken.study.errors import ProfileError


class BandwidthOnly(PreemptionPolicy):
    """Swap when 2 * bytes / bandwidth is less than FLOP / rate (after the cost models of FlexGen and DistServe).

    ``bytes_per_token`` of keys and values cross the link twice at ``bytes_per_s``; ``flop_per_token`` (about twice the
    parameters without embeddings) are done at ``flop_per_s``. Both are proportional to tokens, so the theory knows no
    cross-point: it gives one answer for every length. With the paper's 12,288 bytes a token, 25 GB/s, 0.72 GFLOP a
    token and the 155 TFLOP/s of an A6000 that answer is swap, at 0.98 against 4.6 microseconds a token.
    """

    name = "bandwidth_only"

    def __init__(self, bytes_per_token: float, bytes_per_s: float, flop_per_token: float, flop_per_s: float) -> None:
        given = locals()
        for name in ("bytes_per_token", "bytes_per_s", "flop_per_token", "flop_per_s"):
            if given[name] <= 0:
                raise ProfileError(f"bandwidth_only: {name} must be above 0, not {given[name]}")
        self.swap_s_per_token = 2 * bytes_per_token / bytes_per_s
        self.recompute_s_per_token = flop_per_token / flop_per_s

    def choose(self, tokens: int, now_s: float) -> Action:
        cheaper = tokens * self.swap_s_per_token < tokens * self.recompute_s_per_token
        return Action.SWAP if cheaper else Action.RECOMPUTE
