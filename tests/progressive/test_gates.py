"""From hand-made rows to drops, shares recovered and gates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from firsttoken.progressive.gates import GATES, column, exp_mean, gate, recoveries, share_recovered, summarise


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


def test_columns_are_in_recorded_order():
    assert column(FULL + PRUNED, "s1_none", "extractive", "f1").tolist() == [0, 0, 1, 0.2]
    assert column(FULL, "s0", "text", "text_nll").tolist() == [1.0, 2.0]
    assert len(column(FULL, "s0", "closed_book", "em")) == len(column(FULL, "s9", "text", "text_nll")) == 0


def test_scores_are_per_cent_and_drops_are_points():
    summary = summarise(FULL + PRUNED + HEALED)
    assert {name: summary[name]["value"] for name in ("em_s0", "em_s1_none", "em_s1_ours")} == {
        "em_s0": 75,
        "em_s1_none": 25,
        "em_s1_ours": 50,
    }
    assert summary["f1_s1_ours"]["value"] == pytest.approx(67.5)
    assert summary["em_drop_s1_none"]["value"] == 50 and summary["em_drop_s1_none"]["unit"] == "points"
    assert summary["f1_drop_s1_ours"]["value"] == pytest.approx(12.5)
    assert "em_drop_s0" not in summary
    assert summary["perplexity_s0"]["value"] == pytest.approx(math.exp(1.5))
    assert summary["answer_nll_s0"] == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 4, "unit": "nats"}
    assert {entry["n"] for name, entry in summary.items() if name.startswith("perplexity")} == {2}
    for entry in summary.values():
        assert entry["low"] <= entry["value"] <= entry["high"]


def test_a_drop_is_paired():
    # Both lose the same item: whichever items are drawn, the difference is theirs, and no wider than the scores.
    same = rows_of("s3", [1, 1, 1, 0], [1, 1, 1, 0.2], [1.0, 2.0])
    summary = summarise(FULL + same)
    assert summary["em_drop_s3"]["low"] == summary["em_drop_s3"]["high"] == 0
    assert summary["em_s3"]["low"] < summary["em_s3"]["high"]


def test_choices_and_closed_book_appear_where_they_were_asked():
    closed = [{"variant": "s0", "task": "closed_book", "item": "c", "em": 0.0, "f1": 0.5, "answer_nll": 9.0}]
    summary = summarise(rows_of("s0", [1, 0], [1, 0], [1.0], choices=True) + closed)
    assert summary["choice_s0"]["value"] == 50
    assert (summary["closed_book_f1_s0"]["value"], summary["closed_book_em_s0"]["value"]) == (50, 0)
    assert summary["answer_nll_s0"]["value"] == 1.0, "closed-book losses stay apart"
    without = summarise(FULL)
    assert not [name for name in without if name.startswith(("choice", "closed"))]


@pytest.mark.parametrize(
    ("pruned", "healed", "full", "share"),
    [(10, 10, 20, 0), (10, 20, 20, 1), (10, 15, 20, 0.5), (10, 25, 20, 1.5), (10, 5, 20, -0.5), (5, 3, 1, 0.5)],
)
def test_share_recovered(pruned, healed, full, share):
    parts = np.array([[pruned - 1, healed, full], [pruned + 1, healed, full]], float)
    assert share_recovered(parts) == pytest.approx(share)


def test_where_nothing_was_lost_nothing_is_recovered():
    assert share_recovered(np.array([[1.0, 0.5, 1.0]])) == 0.0


def test_recoveries_of_hand_made_rows():
    found = recoveries(FULL + PRUNED + HEALED, ("ours", "report"))
    assert set(found) == {"em_recovered_s1_ours", "f1_recovered_s1_ours", "log_perplexity_recovered_s1_ours"}
    assert found["em_recovered_s1_ours"]["value"] == pytest.approx(50)
    assert found["f1_recovered_s1_ours"]["value"] == pytest.approx(75)
    assert found["log_perplexity_recovered_s1_ours"]["value"] == pytest.approx(100 * 2 / 3)
    for entry in found.values():
        assert entry["low"] <= entry["value"] <= entry["high"] and entry["unit"] == "% of the loss"


def test_a_pruned_model_that_lost_nothing_has_no_share_to_recover():
    level = rows_of("s1_none", [1, 1, 1, 0], [1, 1, 1, 0.2], [4.0, 5.0])
    assert set(recoveries(FULL + level + HEALED, ("ours",))) == {"log_perplexity_recovered_s1_ours"}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-1, 2, "met"), (2, 3, "met"), (3.1, 5, "missed"), (1, 4, "open"), (3, 4, "open"), (-9, -5, "met")],
)
def test_gates(low, high, verdict):
    assert gate({"value": (low + high) / 2, "low": low, "high": high}, 3.0) == verdict


def test_the_report_gates():
    assert GATES == {"s1": 3.0, "s2": 3.0, "s3": 1.0}


def test_exp_mean():
    assert exp_mean(np.log([2.0, 8.0])) == pytest.approx(4)
