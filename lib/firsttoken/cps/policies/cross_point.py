"""The policy of CPS, and the two bounds that it stands between: a theory without lengths, and all that can be known."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.preemption.preemption_policy import Action, PreemptionPolicy
from firsttoken.study.errors import ProfileError


class CrossPoint(PreemptionPolicy):
    """The paper's policy, a threshold found by profiling (3.3): swap up to ``threshold`` tokens, recompute above.

    The paper sets 1,024; its own Table 2 crosses at 927 (I20).
    """

    name = "cross_point"

    def __init__(self, threshold: float = 1024) -> None:
        if threshold < 0:
            raise ProfileError(f"cross_point: threshold must be 0 tokens or more, not {threshold}")
        self.threshold = threshold

    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.SWAP if tokens <= self.threshold else Action.RECOMPUTE


class BandwidthOnly(PreemptionPolicy):
    """The theory that the paper argues against (2.3): data divided by bandwidth, arithmetic divided by its rate.

    Swap when 2 * bytes / bandwidth is less than FLOP / rate (after the cost models of FlexGen and DistServe).
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


class BothEnds(PreemptionPolicy):
    """A recovery from both ends, where that is cheaper than either way alone by ``costs``: the first tokens are
    computed again while the others are copied back, and both end at about the same time.

    A token's keys and values depend on those before it, so it is the first that can be computed without the others.
    With ``written_through`` the way out costs nothing. ``step`` tokens lie between two lengths that are compared.
    """

    name = "both_ends"

    def __init__(self, costs: Costs, written_through: bool = False, step: int = 16) -> None:
        self.costs, self.written_through, self.step = costs, written_through, step

    def choose(self, tokens: int, now_s: float) -> Action:
        head = self.head(tokens, now_s)
        return Action.SWAP if head == 0 else Action.RECOMPUTE if head == tokens else Action.BOTH_ENDS

    def head(self, tokens: int, now_s: float) -> int:
        return min((*range(0, tokens, self.step), tokens), key=lambda head: self.seconds(head, tokens))

    def seconds(self, head: int, tokens: int) -> float:
        """Seconds of a recovery of ``tokens`` tokens of which the first ``head`` are computed again."""
        copied = tokens - head
        out_s = self.costs.swap_out_s(copied) if copied and not self.written_through else 0.0
        in_s = self.costs.swap_in_s(copied) if copied else 0.0
        return out_s + max(in_s, self.costs.recompute_s(head) if head else 0.0)


class Oracle(PreemptionPolicy):
    """The choice of one who knows the true costs: a bound for every policy, and no policy to run.

    The cheaper way by ``costs_at(now_s)``: expected costs, without the noise of the one recovery at hand.
    """

    name = "oracle"

    def __init__(self, costs_at: Callable[[float], Costs]) -> None:
        self.costs_at = costs_at

    def choose(self, tokens: int, now_s: float) -> Action:
        costs = self.costs_at(now_s)
        return Action.SWAP if costs.swap_s(tokens) <= costs.recompute_s(tokens) else Action.RECOMPUTE
