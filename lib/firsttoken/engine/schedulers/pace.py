"""How long a step will take, learnt from the steps that were: what an adaptive scheduler chooses its chunk by."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from firsttoken.engine.costs.fitted import relative_fit, step_parts

SEEN = 256  # steps that are remembered: a few seconds of a busy GPU, so that a change is soon learnt
REFIT = 16  # steps between two fits, which take 0.3 ms
LEAST = 8  # steps before the first


class Pace:
    """Prices of a step's parts by least squares over the last steps (``costs.fitted``), and how far they were off.

    ``most_tokens`` answers with the largest chunk that keeps a step within a time; before enough was seen, with None.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[list[float], float]] = deque(maxlen=SEEN)
        self._prices: np.ndarray | None = None
        self._margin = 1.0
        self._since = 0

    def observe(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int], seconds: float) -> None:
        """A step of these parts took ``seconds``."""
        if seconds <= 0:
            return
        self._steps.append((step_parts(prefills, contexts), seconds))
        self._since += 1
        if len(self._steps) >= LEAST and (self._prices is None or self._since >= REFIT):
            parts, took = (np.array(column) for column in zip(*self._steps, strict=True))
            self._prices = relative_fit(parts, took)
            predicted = np.maximum(parts @ self._prices, 1e-9)
            self._margin = max(1.0, float(np.quantile(took / predicted, 0.99)))  # one step in a hundred may be longer
            self._since = 0

    def most_tokens(self, contexts: Sequence[int], cached: int, seconds: float, most: int) -> int | None:
        """Tokens of a prompt with ``cached`` tokens behind it, up to ``most``, beside decodes over ``contexts``."""
        if self._prices is None:
            return None
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            took = float(np.dot(step_parts([(cached, middle)], contexts), self._prices)) * self._margin
            low, high = (middle, high) if took <= seconds else (low, middle - 1)
        return low
