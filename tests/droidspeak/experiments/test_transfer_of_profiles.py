"""The rows of profile_transfer: every task on every task of its pair, from profiles that are kept."""

from __future__ import annotations

import pytest

from firsttoken_studies.nb30_full_reuse_and_sensitivity import profiling
from firsttoken_studies.nb34_profile_transfer.study import (
    AT_BOUND,
    OF_SIZE,
    OWN,
    SEEN,
    is_foreign,
    over_own,
    transfer_summary,
)


def row(chosen_on: str, judged_on: str, losses: list[float], rule: str = AT_BOUND, layers: int = 2) -> dict:
    start = {"what": "transfer", "rule": rule, "receiver": "a", "sender": "b", "layers": layers, "n": len(losses)}
    return start | {"chosen_on": chosen_on, "judged_on": judged_on, "group": "0-1", "item_loss": losses}


def test_two_pairs_of_one_task_each(study, monkeypatch):
    study.run("layer_profile")
    monkeypatch.setattr(profiling, "_batch", None)  # what is kept is enough
    result = study.run("profile_transfer")
    assert {(r["sender"], r["judged_on"]) for r in result.rows if r["what"] == "transfer"} == {
        ("base", "hotpotqa"),
        ("other", "hotpotqa"),
    }
    transfers = [r for r in result.rows if r["what"] == "transfer" and r["sender"] == "base"]
    assert [(r["chosen_on"], r["rule"]) for r in transfers] == [
        (SEEN, AT_BOUND),
        (SEEN, OF_SIZE),
        ("hotpotqa", AT_BOUND),
        ("hotpotqa", OF_SIZE),
    ]
    assert all(r["n"] == len(r["item_loss"]) == 6 for r in transfers)
    choices = [r for r in result.rows if r["what"] == "choice" and r["sender"] == "base"]
    assert {r["items"] for r in choices} == {1, 3, 6}
    (unseen,) = result.summary.all("loss_points", sender="base", than=SEEN)
    assert unseen["n"] == 6 and unseen["where"]["task"] == unseen["where"]["chosen_on"] == "hotpotqa"
    assert not result.summary.all("loss_points", than=OWN), "no task was foreign"
    layers = result.summary.of("group_layers", receiver="tuned", sender="base", task="hotpotqa", items=6)
    assert layers["n"] == len(choices) / 3


def test_what_a_foreign_choice_costs():
    rows = [
        row(SEEN, "x", [0.0, 0.0]),
        row("x", "x", [0.1, 0.0]),
        row("y", "x", [0.2, 0.1]),
        row(SEEN, "y", [0.0, 0.0]),
        row("x", "y", [0.0, 0.0]),
        row("y", "y", [0.0, 0.02]),
    ]
    assert [is_foreign(r) for r in rows] == [False, False, True, False, True, False]
    assert over_own(rows, rows[2]) == pytest.approx([0.1, 0.1])
    summary = transfer_summary(rows, {})
    run, over_own_choice = {"receiver": "a", "sender": "b"}, {"variant": AT_BOUND, "than": OWN}
    for chosen_on, task, points in (("y", "x", 10), ("x", "y", -1)):
        value = summary.value("loss_points", **run, chosen_on=chosen_on, task=task, **over_own_choice)
        assert value == pytest.approx(points)
    assert summary.value("loss_points", **over_own_choice, across="worst") == pytest.approx(10)
    mean = summary.of("loss_points", **over_own_choice, across="mean")
    assert mean["value"] == pytest.approx((10 + 10 + 0 - 2) / 4) and mean["n"] == 4
    unseen = summary.value("loss_points", **run, chosen_on="x", task="x", variant=AT_BOUND, than=SEEN)
    assert unseen == pytest.approx(5)


def test_sizes_are_compared_with_their_own():
    rows = [row("x", "x", [0.1, 0.1], OF_SIZE, layers) for layers in (2, 4)]
    rows += [row("y", "x", [0.1 * layers, 0.1], OF_SIZE, layers) for layers in (2, 4)]
    assert over_own(rows, rows[2]) == pytest.approx([0.1, 0])
    assert over_own(rows, rows[3]) == pytest.approx([0.3, 0])
    summary = transfer_summary(rows, {})
    assert summary.value("loss_points", variant=OF_SIZE, than=OWN, across="worst") == pytest.approx(10)
