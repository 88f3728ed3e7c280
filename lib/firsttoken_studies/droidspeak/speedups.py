"""The time to the first token by the share of a prefill that a method computes, between what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from firsttoken.study.errors import RequestError
from firsttoken.study.record import Result, load_result

_AS_FULL = ("full prefill", "sender")  # the sender prefills all its layers, too
_GRID = 2001  # shares of a prefill that are looked at for a time


class TimeShares:
    """Time to the first token as a share of full prefill's, at one length: straight lines between what was measured.

    A line begins at full reuse, which computes nothing of the prefix, and goes on beyond its last point, where more
    work takes at least as long as there.
    """

    def __init__(self, latency: Result, tokens: int) -> None:
        """``latency`` is a result of prefill_latency. Raises RequestError for a length that it does not have."""
        rows = [row for row in latency.rows if row["tokens"] == tokens]
        if not rows:
            lengths = sorted({row["tokens"] for row in latency.rows})
            raise RequestError(f"no prefill of {tokens} tokens was timed; there are {', '.join(map(str, lengths))}")
        self.tokens, self._taken = tokens, {}
        for row in sorted(rows, key=lambda row: row["round"]):
            self._taken.setdefault((row["method"], row["compute"]), []).append(row["first_token_s"])
        self._full = np.array(self._taken["full prefill", 1.0])
        self.provenance: dict[str, Any] = {
            "experiment": latency.experiment,
            "machine": latency.slug,
            "profile": latency.profile,
            "started": latency.started,
            "tokens": tokens,
        }

    def of(self, method: str, compute: float) -> np.ndarray:
        """[rounds]: the time of ``method`` where it computes ``compute`` of a prefill (0..1), over full prefill's.

        Raises RequestError for a method that was not timed.
        """
        if method in _AS_FULL:
            return np.ones_like(self._full)
        line = {share: np.array(times) / self._full for (name, share), times in self._taken.items() if name == method}
        if not line:
            raise RequestError(f"{method!r} was not timed; there are {', '.join(sorted({m for m, _ in self._taken}))}")
        if method == "DroidSpeak":
            line.setdefault(1.0, np.ones_like(self._full))
        line.setdefault(0.0, np.array(self._taken["DroidSpeak", 0.0]) / self._full)
        shares = sorted(line)
        at = min(max(int(np.searchsorted(shares, compute)), 1), len(shares) - 1)
        low, high = shares[at - 1], shares[at]
        found = line[low] + (line[high] - line[low]) * (compute - low) / (high - low)
        # a round in which something else delayed the second last point has a line that falls, below zero in the end
        return np.maximum(found, line[high]) if compute > high else found

    def median(self, method: str, compute: float) -> float:
        """The median over rounds of ``of``."""
        return float(np.median(self.of(method, compute)))

    def compute_of(self, method: str, share: float) -> float:
        """The most that ``method`` computes (0..1) in ``share`` of a full prefill's time; 0 where nothing is in time.

        Raises RequestError for a method that was not timed.
        """
        return float(max((at for at in np.linspace(0, 1, _GRID) if self.median(method, at) <= share), default=0.0))


def times_here() -> TimeShares:
    """The times of this machine at the longest prefix. Raises RequestError where prefill_latency has no result."""
    latency = load_result("prefill_latency")
    if latency is None:
        raise RequestError("no times of this machine are known; first run `firsttoken measure prefill_latency`")
    return TimeShares(latency, max(row["tokens"] for row in latency.rows))
