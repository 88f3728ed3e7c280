"""The study of fine-tunes in one engine: whose request is whose, and what its summary compares."""

from __future__ import annotations

import pytest

from firsttoken_studies.engine import variants_at_once as study


def test_one_after_the_other_gives_each_request_its_own_variant():
    """The requests of a variant are served together, and every answer comes back to its place."""
    calls = []

    def serve(versions, numbers):
        calls.append(list(numbers))
        return [[versions[n % len(versions)], n] for n in numbers]

    assert study.in_turns(serve, ["qa", "lead"], 5) == [["qa", 0], ["lead", 1], ["qa", 2], ["lead", 3], ["qa", 4]]
    assert calls == [[0, 2, 4], [1, 3]]


def test_the_summary_compares_with_one_adapter_and_with_turns():
    cases = {"one adapter": 100.0, "2 adapters": 90.0, f"2 adapters, {study.IN_TURNS}": 45.0}
    rows = [
        {"case": case, "repeat": repeat, "tokens_per_s": rate, "same_tokens": 1.0}
        for case, rate in cases.items()
        for repeat in range(5)
    ]
    summary = study.variants_summary(rows, {"variants": {"counts": [2]}})
    assert summary.value("tokens_per_s_x", case="2 adapters", than="one adapter") == pytest.approx(0.9)
    assert summary.value("tokens_per_s_x", case="2 adapters", than=f"2 adapters, {study.IN_TURNS}") == pytest.approx(2)
    assert summary.value("same_tokens_pct", case="2 adapters") == 100
