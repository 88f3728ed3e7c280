"""The one interface to costs: the engine on a simulated device, the oracle and the tables read all through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Costs(ABC):
    """The seconds that an engine's work takes. A prefill is (tokens already cached, new tokens)."""

    @abstractmethod
    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Seconds of a step: ``prefills``, and a token for each decoding request, with ``contexts`` cached tokens.

        A step without either costs nothing.
        """

    @abstractmethod
    def swap_out_s(self, tokens: int) -> float:
        """Seconds to move the keys and values of ``tokens`` tokens from the device to the host."""

    @abstractmethod
    def swap_in_s(self, tokens: int) -> float:
        """The seconds that it takes to bring them back, preparation (the paper's "prep") included."""

    def recompute_s(self, tokens: int) -> float:
        """Seconds of the prefill of ``tokens`` tokens in a step of its own."""
        return self.step_s([(0, tokens)], [])

    def swap_s(self, tokens: int) -> float:
        """Seconds of one recovery by swap, out and in."""
        return self.swap_out_s(tokens) + self.swap_in_s(tokens)


def step_parts(prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> list[float]:
    """What a step consists of [6], in the order in which ``FittedCosts`` has its prices."""
    new = sum(new for _, new in prefills)
    pairs = sum(new * (cached + new / 2) for cached, new in prefills)
    return [1.0, new, pairs, len(contexts), sum(contexts), len(contexts) * max(contexts, default=0)]
