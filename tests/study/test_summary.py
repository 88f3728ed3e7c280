"""What a summary takes, and how it is asked."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from entries import entry

from firsttoken.study.errors import FirstTokenError
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary, misplaced
from firsttoken_studies.record.results import distinct, frame_of


@pytest.fixture
def summary() -> Summary:
    made = Summary()
    for policy, value in (("swap", 2.0), ("recompute", 3.0)):
        made.add("tpot_p99_ms", {"value": value, "unit": "ms"}, policy=policy, requests=16)
    made.add("best", {"value": "swap"})
    return made


def test_an_entry_is_found_by_what_and_where(summary) -> None:
    found = summary.of("tpot_p99_ms", requests=16, policy="swap")
    assert found == entry("tpot_p99_ms", {"policy": "swap", "requests": 16}, value=2.0, unit="ms")
    assert summary.value("best") == "swap"
    assert summary.get("tpot_p99_ms") is None and summary.get("tpot_p99_ms", policy="swap") is None, "the whole place"
    assert [one["value"] for one in summary.all("tpot_p99_ms", requests=16)] == [2.0, 3.0]
    assert [one["value"] for one in summary.all("tpot_p99_ms", policy="recompute")] == [3.0]


def test_what_is_not_there_is_named_with_what_is(summary) -> None:
    with pytest.raises(FirstTokenError, match=r"no measure tpot_p99_ms \(policy swop, requests 16\); .*did you mean"):
        summary.of("tpot_p99_ms", policy="swop", requests=16)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"policy": "swap", "requests": 16}, r"tpot_p99_ms \(policy swap, requests 16\) is there already"),
        ({"polizy": "swap"}, "no place 'polizy'; known: .*did you mean 'policy'"),
        ({"policy": ["swap"]}, "policy: expected a number, yes or no, or text"),
    ],
)
def test_a_place_is_one_and_of_known_keys(summary, place: dict, message: str) -> None:
    with pytest.raises(FirstTokenError, match=message):
        summary.add("tpot_p99_ms", {"value": 1.0}, **place)
    assert len(summary) == 3


def test_scalars_of_numpy_become_numbers_and_an_entry_may_be_noted_again_elsewhere() -> None:
    summary = Summary()
    first = summary.add("x", bootstrap([1.0, 2.0]).summary("s"), batch=np.int64(4))
    again = summary.add("worst_x", first, across="worst")
    assert json.loads(json.dumps(summary[0]["where"])) == {"batch": 4}
    assert again == first | {"measure": "worst_x", "where": {"across": "worst"}}


def test_what_a_file_holds_is_held_against_the_same_rules() -> None:
    assert misplaced([entry(value=1), entry("n", {"policy": "swap"}, value=1)]) == ""
    assert misplaced([entry(value=1), entry(value=2)]) == "m is there already"


def test_a_result_makes_a_summary_of_its_list(make_result) -> None:
    result = make_result()
    assert result.summary.value("copy_s") == 0.375
    assert isinstance(replace(result, summary=list(result.summary)).summary, Summary)


def test_values_of_a_column_come_once_and_in_their_order() -> None:
    rows = [{"what": "run", "policy": "swap"}, {"what": "run", "policy": "drop"}, {"what": "run", "policy": "swap"}]
    assert distinct([*rows, {"what": "floor"}], "policy", what="run") == ["swap", "drop"]


def test_a_frame_is_summarised_by_its_groups_in_their_order() -> None:
    rows = [{"what": "run", "policy": policy, "took_s": s, "n": 1} for policy in ("swap", "drop") for s in (0.1, 0.3)]
    rows += [{"what": "floor", "took_s": 0.05}]
    summary = Summary()
    summary.by(frame_of(rows, what="run"), {"policy": "policy"}, {"took_ms": ("took_s", "median", "ms", 1000)}, batch=4)
    summary.by(frame_of(rows), {}, {"n": ("n", "mean", "")})
    summary.by(frame_of(rows, what="nothing"), {"policy": "policy"}, {"took_ms": ("took_s", "mean", "ms")})
    assert [entry["where"] for entry in summary] == [{"policy": "swap", "batch": 4}, {"policy": "drop", "batch": 4}, {}]
    assert summary.of("took_ms", policy="drop", batch=4)["value"] == pytest.approx(200)
    assert summary.of("n")["n"] == 4, "a row without a value counts for nothing"
