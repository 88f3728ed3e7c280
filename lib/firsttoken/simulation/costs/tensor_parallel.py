"""A profile of a model that is split over several GPUs, and what of it can be said for another number of them.

A published profile holds the operators of one GPU's share. What the GPUs exchange is in no profile: two all-reduces a
layer, of the hidden states of all tokens of the batch, whose times ``OperatorTables`` has by bytes. A number of GPUs
that nobody profiled follows from a profile of one GPU and the ratio of the same step's sums of measured operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firsttoken.assets.dense_shape import DenseShape
from firsttoken.engine.costs.cost_model import Costs, follow
from firsttoken.simulation.costs.operator_costs import MOST_TOKENS, OperatorCosts
from firsttoken.simulation.costs.operator_tables import OperatorTables, power_between
from firsttoken.study.errors import ProfileError

_NUMBER_BYTES = 2  # hidden states stay in 16 bits, whatever the weights are in


@dataclass(frozen=True)
class ExchangingCosts(Costs):
    """The steps of ``share``, one GPU's part of a model, and the all-reduces that follow attention and MLP.

    They are added up one after the other: nothing is computed while the GPUs exchange, as vLLM does it by default.
    """

    share: Costs
    exchange_s: np.ndarray  # [tokens]: seconds of a step's all-reduces

    @classmethod
    def of(cls, share: Costs, tables: OperatorTables, shape: DenseShape, gpus: int) -> ExchangingCosts:
        """The costs of ``shape`` on ``gpus`` of the card of ``tables``, of which each takes ``share``.

        Raises ProfileError for fewer than two GPUs, and for a number of them whose all-reduce was not measured.
        """
        if gpus < 2:
            raise ProfileError(f"{gpus} GPUs exchange nothing; take the profile as it is, or at least 2 GPUs")
        once = power_between(_sent(shape), tables.all_reduce(gpus))
        return cls(share, np.concatenate([[0.0], 2 * shape.layers * once]))

    @classmethod
    def over_link(cls, share: Costs, shape: DenseShape, gpus: int, bytes_s: float, latency_s: float) -> ExchangingCosts:
        """Return the costs where nobody measured the all-reduce: in a ring, over links of ``bytes_s`` each way.

        Each GPU sends an n-th of the bytes to the next one 2 (n - 1) times (Patarasuk and Yuan, Bandwidth optimal
        all-reduce algorithms, 2009). Raises ProfileError for fewer than two GPUs, and a link that has no rate.
        """
        if gpus < 2 or bytes_s <= 0 or latency_s < 0:
            raise ProfileError("a ring has at least 2 GPUs, links above 0 bytes a second and latencies from 0 on")
        once = 2 * (gpus - 1) * (_sent(shape) / gpus / bytes_s + latency_s)
        return cls(share, np.concatenate([[0.0], 2 * shape.layers * once]))

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        tokens = sum(new for _, new in prefills) + len(contexts)
        return self.share.step_s(prefills, contexts) + follow(self.exchange_s, tokens)

    def swap_out_s(self, tokens: int) -> float:
        """Charge what one GPU's share takes: all GPUs move theirs at once."""
        return self.share.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        """The seconds of one GPU's share, as on the way out."""
        return self.share.swap_in_s(tokens)


def _sent(shape: DenseShape) -> np.ndarray:
    """Bytes [tokens] of the hidden states of 1 to ``MOST_TOKENS`` tokens."""
    return np.arange(1, MOST_TOKENS + 1, dtype=float) * shape.hidden * _NUMBER_BYTES


@dataclass(frozen=True)
class ScaledProfile(Costs):
    """The steps of ``profiled``, a whole model on one GPU, as they would be where it is split.

    Each step takes what was profiled, times the ratio of the same step by measured operators: ``split`` over ``alone``.
    """

    profiled: Costs
    alone: OperatorCosts
    split: OperatorCosts

    def __post_init__(self) -> None:
        if self.alone.gpus != 1 or self.alone.shape != self.split.shape:
            raise ProfileError("scaled costs: the operators must be of one shape, alone on 1 GPU and split over others")

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        alone_s = self.alone.step_s(prefills, contexts)
        return (
            self.profiled.step_s(prefills, contexts) * self.split.step_s(prefills, contexts) / alone_s if alone_s else 0
        )

    def swap_out_s(self, tokens: int) -> float:
        """Charge each GPU's share of the bytes at the card's PCIe rate: a profile has no such time."""
        return self.split.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        """The seconds of one GPU's share, as on the way out."""
        return self.split.swap_in_s(tokens)
