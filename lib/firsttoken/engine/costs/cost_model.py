"""The one interface to costs: the engine on a simulated device, the oracle and the tables read all through it.

What was measured at some sizes is a line over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise


class Costs(ABC):
    """The seconds that an engine's work takes. A prefill is (tokens already cached, new tokens)."""

    @abstractmethod
    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Seconds of a step: ``prefills``, and a token for each decoding request, with ``contexts`` cached tokens.

        A step without either costs nothing.
        """

    def decode_steps_s(self, contexts: Sequence[int], steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps in which the same requests decode, who have ``contexts`` cached tokens in
        the first of them."""
        return [self.step_s((), [tokens + step for tokens in contexts]) for step in range(steps)]

    @abstractmethod
    def swap_out_s(self, tokens: int) -> float:
        """Seconds to move the keys and values of ``tokens`` tokens from the device to the host."""

    @abstractmethod
    def swap_in_s(self, tokens: int) -> float:
        """Seconds to move the keys and values of ``tokens`` tokens back to the device, preparation (the paper's "prep")
        included."""

    def recompute_s(self, tokens: int) -> float:
        """Seconds of the prefill of ``tokens`` tokens in a step of its own."""
        return self.step_s([(0, tokens)], [])

    def swap_s(self, tokens: int) -> float:
        """Seconds of one recovery by swap, out and in."""
        return self.swap_out_s(tokens) + self.swap_in_s(tokens)


def step_parts(prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> list[float]:
    """Return the parts of a step [6], in the order in which ``FittedCosts`` has its prices."""
    new = sum(new for _, new in prefills)
    pairs = sum(new * (cached + new / 2) for cached, new in prefills)
    return [1.0, new, pairs, len(contexts), sum(contexts), len(contexts) * max(contexts, default=0)]


def line_through(points: Mapping[int, float], most: int) -> list[float]:
    """The value at 0 ... ``most`` [most + 1] from ``points``, ascending: straight between them, below the first as
    there, and beyond the last as it went over the upper half, since a table may end on the flat stair of a tile."""
    lengths, values = list(points), list(points.values())
    line = [values[0]] * min(lengths[0], most + 1)
    for (start, low), (end, high) in pairwise(points.items()):
        slope = (high - low) / (end - start)
        line += [slope * (length - start) + low for length in range(start, min(end, most + 1))]
    slope = 0.0
    if len(lengths) > 1:
        middle = max(bisect_right(lengths, lengths[-1] / 2) - 1, 0)
        slope = (values[-1] - values[middle]) / (lengths[-1] - lengths[middle])
    return line + [values[-1] + slope * beyond for beyond in range(most + 1 - lengths[-1])]


def follow(line: Sequence[float], count: int) -> float:
    """Return ``line[count]``, continuing the line by its last step beyond its end."""
    if count < len(line):
        return float(line[count])
    return float(line[-1] + (count - len(line) + 1) * (line[-1] - line[-2]))
