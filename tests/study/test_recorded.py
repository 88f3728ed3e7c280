"""Every committed result says what its own rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firsttoken.experiments import EXPERIMENTS
from firsttoken.study import paths
from firsttoken.study.record import read_result

RECORDED = sorted(path for path in paths.RECORDED.glob("*/*/*.json") if path.stem in EXPERIMENTS)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_summary_is_that_of_the_rows(path: Path) -> None:
    result = read_result(path)
    experiment = EXPERIMENTS[result.experiment]
    if not experiment.summary:
        pytest.skip("not converted yet")
    made = json.loads(json.dumps(experiment.summarise(result.rows, result.parameters), default=lambda x: x.item()))
    assert made.keys() == result.summary.keys()
    for name, entry in made.items():
        assert entry == pytest.approx(result.summary[name]), name
