"""Sets of layers with as many runs as asked for, every one equally likely; and what is measured over them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.prefill import spans
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb31_contiguous_groups.study import TransitionsConfig, layer_sets, transitions


def config(layers: int, *counts: int, draws: int = 4) -> TransitionsConfig:
    return TransitionsConfig(layers, counts, draws, items=1, runs=1)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_sets_have_so_many_layers_in_so_many_runs(data):
    depth = data.draw(st.integers(1, 10))
    layers = data.draw(st.integers(1, depth))
    most = min(layers, depth - layers + 1)
    counts = data.draw(st.lists(st.integers(1, most), unique=True, min_size=1))
    found = list(layer_sets(depth, config(layers, *counts), data.draw(st.integers(0, 99))))
    assert len(found) == len(set(found))
    for count, chosen in found:
        assert len(chosen) == len(set(chosen)) == layers and len(spans(chosen)) == count
        assert chosen[0] >= 0 and chosen[-1] < depth and list(chosen) == sorted(chosen)
    there_are = Counter(len(spans(c)) for c in combinations(range(depth), layers))
    drawn = Counter(count for count, _ in found)
    assert drawn == {count: min(4, there_are[count]) for count in counts}


def test_every_set_is_as_likely_as_any_other():
    drawn = Counter()
    for seed in range(1200):
        drawn.update(layers for _, layers in layer_sets(6, config(3, 2, draws=1), seed))
    there_are = [c for c in combinations(range(6), 3) if len(spans(c)) == 2]
    assert set(drawn) == set(there_are)
    expected = 1200 / len(there_are)
    assert sum((n - expected) ** 2 / expected for n in drawn.values()) < 31.3  # chi-squared, 11 degrees, 0.1 %


@pytest.mark.parametrize(
    ("depth", "asked", "message"),
    [
        (6, config(4, 1, 4), "4 of 6 layers lie in 1 to 3 contiguous runs, not in 4"),
        (6, config(3, 0), "not in 0"),
        (6, config(0, 1), "0 layers do not fit 6; give 1 to 6"),
        (6, config(8, 1), "8 layers do not fit 6"),
    ],
)
def test_what_cannot_be_is_refused(depth, asked, message):
    with pytest.raises(ProfileError, match=message):
        next(layer_sets(depth, asked, 0))


def test_the_experiment(study, same):
    result = study.run("transitions")
    assert len(result.rows) == 2 * 2 * 2 and result.seeds == [0]
    for row in result.rows:
        layers = [int(layer) for layer in row["layers"].split(",")]
        assert (len(spans(layers)), len(layers), row["n"]) == (row["transitions"], 2, 5)
        assert row["deviation"] > 0
    runs = [{"receiver": "tuned", "sender": sender, "task": "hotpotqa"} for sender in ("base", "other")]
    where = [place | {"transitions": n} for place in [*runs, {"across": "mean"}] for n in (1, 2)]
    assert [entry["where"] for entry in result.summary.all("deviation")] == where
    both = [result.summary.value("deviation", **run, transitions=1) for run in runs]
    assert result.summary.value("deviation", across="mean", transitions=1) == pytest.approx(sum(both) / 2)
    assert transitions(study.profile()).rows == result.rows
    outcome = transitions(study.profile(**{"reuse.runs": [same], "transitions.runs": 1}))
    assert {(row["deviation"], row["accuracy_lost"]) for row in outcome.rows} == {(0.0, 0.0)}
