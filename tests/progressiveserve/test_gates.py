"""From hand-made rows to drops, shares recovered and gates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from firsttoken.progressiveserve.quality_gates import (
    gate,
    recoveries,
    share_recovered,
    summarise,
)

PLACES = {
    "s0": {"stage": 0},
    **{f"s1_{recipe}": {"stage": 1, "recipe": recipe} for recipe in ("none", "ours", "report")},
    "s3": {"stage": 3},
}


def rows_of(variant: str, em: list[float], f1: list[float], nll: list[float], choices: bool = False) -> list[dict]:
    """One extractive row an item and one window of text a loss."""
    found = []
    for i, (exact, overlap) in enumerate(zip(em, f1, strict=True)):
        row = {"variant": variant, "task": "extractive", "item": str(i), "em": exact, "f1": overlap, "answer_nll": 1.0}
        found.append(row | ({"choice_correct": exact} if choices else {}))
    return found + [{"variant": variant, "task": "text", "item": f"w{i}", "text_nll": v} for i, v in enumerate(nll)]


FULL = rows_of("s0", [1, 1, 1, 0], [1, 1, 1, 0.2], [1.0, 2.0])
PRUNED = rows_of("s1_none", [0, 0, 1, 0], [0, 0, 1, 0.2], [4.0, 5.0])
HEALED = rows_of("s1_ours", [1, 0, 1, 0], [1, 0.5, 1, 0.2], [2.0, 3.0])


def test_scores_are_per_cent_and_drops_are_points():
    summary = summarise(FULL + PRUNED + HEALED, PLACES)
    assert [(entry["where"], entry["value"]) for entry in summary.all("em_pct")] == [
        (PLACES["s0"], 75),
        (PLACES["s1_none"], 25),
        (PLACES["s1_ours"], 50),
    ]
    assert summary.value("f1_pct", stage=1, recipe="ours") == pytest.approx(67.5)
    drop = summary.of("em_drop", stage=1, recipe="none")
    assert (drop["value"], drop["unit"]) == (50, "points")
    assert summary.value("f1_drop", stage=1, recipe="ours") == pytest.approx(12.5)
    assert not summary.all("em_drop", stage=0)
    assert summary.value("perplexity", stage=0) == pytest.approx(math.exp(1.5))
    loss = {"value": 1.0, "low": 1.0, "high": 1.0, "n": 4, "unit": "nats"}
    assert summary.of("answer_nll", stage=0) == {"measure": "answer_nll", "where": {"stage": 0}} | loss
    assert {entry["n"] for entry in summary.all("perplexity")} == {2}
    for entry in summary:
        assert entry["low"] <= entry["value"] <= entry["high"]


def test_a_drop_is_paired():
    # Both lose the same item: whichever items are drawn, the difference is theirs, and no wider than the scores.
    same = rows_of("s3", [1, 1, 1, 0], [1, 1, 1, 0.2], [1.0, 2.0])
    summary = summarise(FULL + same, PLACES)
    drop, score = summary.of("em_drop", stage=3), summary.of("em_pct", stage=3)
    assert drop["low"] == drop["high"] == 0
    assert score["low"] < score["high"]


def test_choices_and_closed_book_appear_where_they_were_asked():
    closed = [{"variant": "s0", "task": "closed_book", "item": "c", "em": 0.0, "f1": 0.5, "answer_nll": 9.0}]
    summary = summarise(rows_of("s0", [1, 0], [1, 0], [1.0], choices=True) + closed, PLACES)
    assert summary.value("choice_pct", stage=0) == 50
    assert [summary.value(score, stage=0, task="closed_book") for score in ("f1_pct", "em_pct")] == [50, 0]
    assert summary.value("answer_nll", stage=0) == 1.0, "closed-book losses stay apart"
    without = summarise(FULL, PLACES)
    assert not without.all("choice_pct") and not any("task" in entry["where"] for entry in without)


@pytest.mark.parametrize(
    ("pruned", "healed", "full", "share"),
    [(10, 10, 20, 0), (10, 20, 20, 1), (10, 25, 20, 1.5), (10, 5, 20, -0.5), (5, 3, 1, 0.5), (10, 5, 10, 0)],
)
def test_share_recovered(pruned, healed, full, share):
    parts = np.array([[pruned - 1, healed, full], [pruned + 1, healed, full]], float)
    assert share_recovered(parts) == pytest.approx(share)


def test_recoveries_of_hand_made_rows():
    found = recoveries(FULL + PRUNED + HEALED, PLACES)
    assert len(found) == 3
    ours = {"stage": 1, "recipe": "ours"}
    assert found.value("em_recovered_pct", **ours) == pytest.approx(50)
    assert found.value("f1_recovered_pct", **ours) == pytest.approx(75)
    assert found.value("log_perplexity_recovered_pct", **ours) == pytest.approx(100 * 2 / 3)
    for entry in found:
        assert entry["low"] <= entry["value"] <= entry["high"] and entry["unit"] == "% of the loss"


def test_a_pruned_model_that_lost_nothing_has_no_share_to_recover():
    level = rows_of("s1_none", [1, 1, 1, 0], [1, 1, 1, 0.2], [4.0, 5.0])
    (entry,) = recoveries(FULL + level + HEALED, PLACES)
    assert (entry["measure"], entry["where"]) == ("log_perplexity_recovered_pct", PLACES["s1_ours"])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-1, 2, "met"), (2, 3, "met"), (3.1, 5, "missed"), (1, 4, "open"), (3, 4, "open"), (-9, -5, "met")],
)
def test_gates(low, high, verdict):
    assert gate({"value": (low + high) / 2, "low": low, "high": high}, 3.0) == verdict
