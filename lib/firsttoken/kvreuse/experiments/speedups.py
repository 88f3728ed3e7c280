"""How much faster the first token comes: the time that a share of a prefill takes, and what the loss bound allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from firsttoken.kvreuse.experiments.profiling import BOUND, profiled_groups
from firsttoken.kvreuse.experiments.tables import by_run
from firsttoken.kvreuse.profile.pareto import Profiled, smallest_within
from firsttoken.kvreuse.profile.transfer import resampled
from firsttoken.study.errors import RequestError
from firsttoken.study.record import Result, Rows
from firsttoken.study.stats import Interval

RELATIVE, POINTS = "5 %", "5 points"
BOUNDS: dict[str, Callable[[Sequence[Profiled]], Profiled]] = {  # the paper's bound and the report's (errata I41)
    RELATIVE: lambda groups: smallest_within(groups, BOUND),
    POINTS: lambda groups: smallest_within(groups, BOUND, absolute=True),
}
_DRAWS = 200
_AS_FULL = ("full prefill", "sender")  # the sender prefills all its layers, too


class TimeShares:
    """Time to the first token as a share of full prefill's, at one length: straight lines between what was measured.

    A line begins at full reuse, which computes nothing of the prefix, and goes on beyond its last point.
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
        return line[low] + (line[high] - line[low]) * (compute - low) / (high - low)

    def gain(self, layers: int, again: Sequence[int], depth: int, seed: int = 0) -> Interval:
        """How many times faster the first token comes with ``layers`` of ``depth`` recomputed; median over rounds.

        The interval is over ``again``, other choices that might have been, each timed in a round drawn at random.
        """
        rng = np.random.default_rng(seed)
        drawn = [rng.choice(1 / self.of("DroidSpeak", other / depth)) for other in again]
        low, high = map(float, np.percentile(drawn, [2.5, 97.5]))
        return Interval(float(np.median(1 / self.of("DroidSpeak", layers / depth))), low, high, len(drawn))


def speedups(profile: Result, times: TimeShares) -> Rows:
    """A row a run and bound: the chosen group, and the gain with an interval over choices and rounds.

    ``profile`` is a result of layer_profile. The items that chose are drawn again, with replacement.
    """
    rows = []
    for run, of in by_run(profile).items():
        groups, depth = profiled_groups(of), sum(row["what"] == "layer" for row in of)
        for bound, choose in BOUNDS.items():
            chosen = choose(groups)
            again = resampled(groups, len(chosen.own), choose, draws=_DRAWS)
            gain = times.gain(len(chosen.group), [len(choice.group) for choice in again], depth)
            rows.append(
                {"run": run, "bound": bound, "group": str(chosen.group), "layers": len(chosen.group), "depth": depth}
                | {"gain": gain.summary("x"), "loss": chosen.loss.summary("points", 100)}
                | {"relative_pct": 100 * chosen.relative_loss}
            )
    return rows
