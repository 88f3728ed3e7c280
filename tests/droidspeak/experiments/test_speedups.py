"""Times between measured shares, and what is computed in a time."""

from __future__ import annotations

import numpy as np
import pytest

from firsttoken.study.errors import RequestError
from firsttoken_studies.nb33_latency_and_quality.reuse_methods import TimeShares
from firsttoken_studies.record.results import Result


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


def test_more_work_is_never_faster_than_the_last_point_of_a_round_that_was_delayed():
    late = latency()
    delayed = next(row for row in late.rows if (row["method"], row["compute"], row["round"]) == ("CacheBlend", 0.2, 0))
    delayed["first_token_s"] *= 50
    assert TimeShares(late, 64).of("CacheBlend", 1.0) == pytest.approx(np.array([1.5 * 0.46, 1.5]))


def test_what_was_not_timed():
    with pytest.raises(RequestError, match="no prefill of 65 tokens was timed; there are 64"):
        TimeShares(latency(), 65)
    with pytest.raises(RequestError, match="'guessing' was not timed"):
        TimeShares(latency(), 64).of("guessing", 0.5)


@pytest.mark.parametrize(
    ("method", "share", "compute"),
    [
        ("DroidSpeak", 0.325, 0.25),
        ("DroidSpeak", 1.0, 1.0),
        ("CacheBlend", 1.5 * 0.37, 0.3),
        ("CacheBlend", 1.5 * 0.64, 0.6),
        ("CacheBlend", 0.05, 0.0),
    ],
    ids=["between", "all", "between two", "beyond the last", "too short a time"],
)
def test_what_is_computed_in_a_time(method: str, share: float, compute: float):
    assert TimeShares(latency(), 64).compute_of(method, share) == pytest.approx(compute, abs=1e-3)
