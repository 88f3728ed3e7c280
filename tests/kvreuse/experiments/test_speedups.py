"""Times between measured shares, and the gain of a choice with an interval over other choices."""

from __future__ import annotations

import numpy as np
import pytest

from firsttoken.kvreuse.experiments.speedups import POINTS, RELATIVE, TimeShares, speedups
from firsttoken.study.errors import RequestError
from firsttoken.study.record import Result


def result(rows: list[dict]) -> Result:
    return Result("x", "quick", {}, {"slug": "here"}, {}, "", [0], "2026-01-01", 0.0, {}, rows, {}, {})


def latency() -> Result:
    """Two rounds, the second twice as slow: 0.1 of a full prefill for the first token, straight in between."""
    shares = {"full prefill": [1.0], "DroidSpeak": [0.0, 0.5], "CacheBlend": [0.2, 0.4], "smaller model": [0.5]}
    return result(
        [
            {"method": method, "tokens": 64, "compute": share, "round": step, "first_token_s": (step + 1) * seconds}
            for step in (0, 1)
            for method, each in shares.items()
            for share in each
            for seconds in [(0.1 + 0.9 * share) * (1.5 if method == "CacheBlend" else 1.0)]
        ]
    )


@pytest.mark.parametrize(
    ("method", "compute", "share"),
    [
        ("full prefill", 1.0, 1.0),
        ("sender", 1.0, 1.0),
        ("DroidSpeak", 0.0, 0.1),
        ("DroidSpeak", 0.25, 0.325),
        ("DroidSpeak", 0.75, 0.775),
        ("DroidSpeak", 1.0, 1.0),
        ("smaller model", 0.5, 0.55),
        ("CacheBlend", 0.3, 1.5 * 0.37),
        ("CacheBlend", 0.1, (0.1 + 1.5 * 0.28) / 2),
        ("CacheBlend", 0.6, 1.5 * 0.64),
    ],
)
def test_straight_lines(method: str, compute: float, share: float):
    assert TimeShares(latency(), 64).of(method, compute) == pytest.approx(np.array([share, share]))


def test_what_was_not_timed():
    with pytest.raises(RequestError, match="no prefill of 65 tokens was timed; there are 64"):
        TimeShares(latency(), 65)
    with pytest.raises(RequestError, match="'guessing' was not timed"):
        TimeShares(latency(), 64).of("guessing", 0.5)


def profile_rows(own: list[float], losses: dict[tuple[int, int], float]) -> list[dict]:
    def row(what: str, lo: int, hi: int, loss: float) -> dict:
        return {"run": "a <- b: qa", "what": what, "lo": lo, "hi": hi, "item_accuracy": [own_ - loss for own_ in own]}

    groups = [row("group" if hi else "reuse", lo, hi, loss) for (lo, hi), loss in losses.items()]
    return [row("own", 0, 0, 0.0), *(row("layer", layer, layer + 1, 0.0) for layer in range(4)), *groups]


def test_a_relative_bound_and_one_in_points():
    """Four points of fifty are within 5 points, and not within 5 %."""
    rows = profile_rows([0.5] * 6, {(0, 0): 0.3, (0, 2): 0.04, (0, 4): 0.0})
    found = {row["bound"]: row for row in speedups(result(rows), TimeShares(latency(), 64))}
    assert (found[RELATIVE]["group"], found[POINTS]["group"]) == ("0-3", "0-1")
    assert found[RELATIVE]["gain"]["value"] == pytest.approx(1)
    gain = found[POINTS]["gain"]
    assert (gain["value"], gain["low"], gain["high"]) == pytest.approx([1 / 0.55] * 3)
    assert found[POINTS]["loss"]["value"] == pytest.approx(4) and found[POINTS]["relative_pct"] == pytest.approx(8)
