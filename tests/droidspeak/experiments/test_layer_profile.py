"""The profile of a run: its table, that it goes on where it stopped, and what it is kept under."""

from __future__ import annotations

import json
import math

import pytest

from firsttoken.droidspeak.layer_group import Group
from firsttoken_studies.nb30_full_reuse_and_sensitivity import profiling
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import layer_profile, profile_summary, profiled_groups

OF_A_RUN = [
    "accuracy_pct",
    "loss_points",
    "relative_loss_pct",
    "critical_layers_pct",
    "group",
    "group_layers_pct",
    "loss_points",
    "profile_s",
    "prefix_passes",
    "prefix_passes",
    "weight_distance_pct",
]
OF_ALL = [
    "widest_layer_depth",
    "critical_layers_pct",
    "runs_with_loss",
    "group_layers_pct",
    "relative_loss_pct",
    "prefix_passes_fewer_x",
]
WHAT = ["own", "sender", *["layer"] * 4, "reuse", *["group"] * 3, "cost", "weights"]


@pytest.fixture(scope="module")
def counted():
    """Counts batches that are computed, and breaks off after as many as it is told."""

    class Counted:
        made, most = 0, math.inf
        kept = staticmethod(profiling._batch)

        def __call__(self, *args):
            if self.made == self.most:
                raise KeyboardInterrupt
            self.made += 1
            return self.kept(*args)

    return Counted


def test_the_table_of_two_runs(study):
    result = study.run("layer_profile")
    names = ["tuned <- base: hotpotqa", "tuned <- other: hotpotqa"]
    assert list(dict.fromkeys(row["run"] for row in result.rows)) == names
    summary = result.summary
    for name, sender in zip(names, ("base", "other"), strict=True):
        rows = [row for row in result.rows if row["run"] == name]
        assert [row["what"] for row in rows] == WHAT
        for row in rows[:-2]:
            assert row["n"] == len(row["item_nll"]) == len(row["item_accuracy"]) == 6
            assert row["accuracy"] == pytest.approx(sum(row["item_accuracy"]) / 6, abs=1e-4)
            assert all(0 <= a <= 1 for a in row["item_accuracy"]) and all(n >= 0 for n in row["item_nll"])
        by_group = {(row["lo"], row["hi"]): row for row in rows if row["what"] == "group"}
        assert list(by_group) == [(0, 2), (0, 4), (2, 4)]
        assert by_group[0, 4]["item_nll"] == rows[0]["item_nll"], "all layers recomputed is the receiver's own"
        run = {"receiver": "tuned", "sender": sender, "task": "hotpotqa"}
        assert summary.value("prefix_passes", variant="shared", **run) == (4 + 4 + 2) / 4  # sender, own, from layer 2
        assert summary.value("prefix_passes", variant="naive", **run) == (2 + 4 + 2) / 4
        assert summary.value("group", **run) in {"none", "0-1", "0-3", "2-3"}
        assert summary.value("weight_distance_pct", **run) > 0
    assert [entry["measure"] for entry in summary] == [*OF_A_RUN, *OF_A_RUN, *OF_ALL]
    fewer = summary.value("prefix_passes_fewer_x", variant="naive", layers=2, than="single layers")
    assert fewer == (4 * 1 + 3 * 2 + 2 * 3 + 4) / (2 + 2 + 4)
    assert result.rows[0]["accuracy"] > 0.5, "the receiver has learnt its task"
    content = json.loads(result.path.read_text())
    del content["parameters"]  # recorded as the user typed them
    assert str(study.folder.parent) not in json.dumps(content)


def test_a_sender_that_is_the_receiver_loses_nothing(study, same):
    outcome = layer_profile(study.profile(**{"reuse.runs": [same]}))
    own, *others = outcome.rows[:-2]
    assert len(others) == 9 and all(row["item_nll"] == pytest.approx(own["item_nll"], abs=0.002) for row in others)
    value, run = profile_summary(outcome.rows, {}).value, {"receiver": "base", "sender": "base", "task": "hotpotqa"}
    assert value("loss_points", method="full reuse", **run) == value("weight_distance_pct", **run) == 0
    assert value("group", **run) == "none"
    assert {g.group for g in profiled_groups(outcome.rows)} == {Group(0, 0), Group(0, 2), Group(0, 4), Group(2, 4)}


def test_an_interrupted_profile_goes_on_where_it_stopped(study, counted, tmp_path, monkeypatch):
    whole = layer_profile(study.profile()).rows
    monkeypatch.setattr(profiling.paths, "CACHE", tmp_path)
    first, second, third = counted(), counted(), counted()
    first.most = 3  # of four batches: two a run
    monkeypatch.setattr(profiling, "_batch", first)
    with pytest.raises(KeyboardInterrupt):
        layer_profile(study.profile())
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert len(kept) == 3

    monkeypatch.setattr(profiling, "_batch", second)
    rows = layer_profile(study.profile()).rows
    assert second.made == 1 and {path: path.read_bytes() for path in kept} == kept

    def steady(rows):
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    assert steady(rows) == steady(whole)

    monkeypatch.setattr(profiling, "_batch", third)
    assert layer_profile(study.profile()).rows == rows and third.made == 0


@pytest.mark.parametrize(
    "change",
    [{"step": 3}, {"reuse.batch": 3}, {"reuse.items": 5}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_another_profile_is_another_one(study, counted, change, monkeypatch):
    short = {"reuse.runs": [f"tuned <- base: {study.task}, 96 tokens"]}
    change = dict(change)
    steps = {"reuse.runs": [f"{short['reuse.runs'][0]}, groups of {change.pop('step', 2)}"]}
    layer_profile(study.profile(**short))
    again, other = counted(), counted()
    monkeypatch.setattr(profiling, "_batch", again)
    layer_profile(study.profile(**short))
    monkeypatch.setattr(profiling, "_batch", other)
    layer_profile(study.profile(**steps, **change))
    assert (again.made, other.made) == (0, 2)
