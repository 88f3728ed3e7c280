"""Every committed result says what its own rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firsttoken.study import paths
from firsttoken_studies.record.results import is_clean, read_result
from firsttoken_studies.record.verdicts import RECORDED_UNDER
from firsttoken_studies.registry import EXPERIMENTS

RECORDED = [  # quick results are those of whoever ran the notebooks last, maybe with code of before
    path
    for profile in RECORDED_UNDER
    for path in sorted(paths.RECORDED.glob(f"*/{profile}/*"))
    if path.name.split(".")[0] in EXPERIMENTS
]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_summary_is_that_of_the_rows(path: Path) -> None:
    result = read_result(path)
    experiment = EXPERIMENTS[result.experiment]
    made = json.loads(json.dumps(experiment.summarise(result.rows, result.parameters), default=lambda x: x.item()))
    assert len(made) == len(result.summary)
    for entry, kept in zip(made, result.summary, strict=True):
        assert (entry.pop("measure"), entry.pop("where")) == (kept["measure"], kept["where"])
        assert entry == pytest.approx({name: kept[name] for name in kept.keys() - {"measure", "where"}}), kept


OF_DIRTY_TREES = {("full", "healing_training"), ("full", "reuse_training")}  # until they are recorded again


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_revision_is_that_of_a_commit(path: Path) -> None:
    result = read_result(path)
    assert is_clean(result.git_revision) != ((result.profile, result.experiment) in OF_DIRTY_TREES)
