"""The choice of one who knows the true costs: a bound for every policy, and no policy to run."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.preemption.preemption_policy import Action, PreemptionPolicy


class Oracle(PreemptionPolicy):
    """The cheaper way by ``costs_at(now_s)``: expected costs, without the noise of the one recovery at hand."""

    name = "oracle"

    def __init__(self, costs_at: Callable[[float], Costs]) -> None:
        self.costs_at = costs_at

    def choose(self, tokens: int, now_s: float) -> Action:
        costs = self.costs_at(now_s)
        return Action.SWAP if costs.swap_s(tokens) <= costs.recompute_s(tokens) else Action.RECOMPUTE
