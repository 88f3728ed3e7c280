"""The quick profile on tiny folders, with adapters that the experiment itself has trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from firsttoken.study import paths
from firsttoken.study.profile import Profile, load_profile
from firsttoken_studies.experiments import run_experiment
from firsttoken_studies.nb30_full_reuse_and_sensitivity.training import reuse_training
from firsttoken_studies.record.results import Outcome, Result


@dataclass(frozen=True)
class Study:
    """``folder`` has the cache and the results; ``trained`` is what the training of the adapters gave."""

    folder: Path
    profile: Callable[..., Profile]
    trained: Outcome
    base: str
    task: str

    def run(self, name: str, **overrides: object) -> Result:
        """An experiment as a user runs it."""
        return run_experiment(name, self.profile(**overrides))


@pytest.fixture(scope="session")
def study(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Runs "tuned <- base" and "tuned <- .../other" on a LongBench file, 6 items to choose with and 6 to judge with."""
    folder, task = tmp_path_factory.mktemp("study"), str(folders / "hotpotqa.jsonl")
    base, other = str(folders / "base"), str(folders / "other")

    def profile(**overrides: object) -> Profile:
        small = {
            "model": base,
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "reuse.runs": [f"tuned <- base: {task}, 96 tokens", f"tuned <- {other}: {task}, 96 tokens"],
            "reuse.adapters": str(folder / "adapters"),
            "reuse.items": 6,
            "reuse.eval_items": 6,
            "reuse.batch": 4,
            "reuse_training.adapters": [f"tuned: {task}: 60", f"half-hotpotqa: {task}: 2"],
            "reuse_training.learning_rate": 2e-2,
            "reuse_training.tokens": 96,
            "reuse_training.items": 0,
            "transitions.layers": 2,
            "transitions.transitions": [1, 2],
            "transitions.items": 5,
            "transitions.runs": 2,
            "methods.runs": 2,
            "methods.blends": ["0.15 gradual", "equal compute", "equal latency", "equal latency from 2"],
            "methods.smaller": "half-hotpotqa",
            "latency.tokens": [40],
            "latency.layers": [0, 2, 4],
            "latency.rounds": 2,
            "loading.gbit_per_s": [0, 0.02],
            "loading.tokens": 48,
            "loading.rounds": 2,
            "loading.rivals": 2,
        }
        return load_profile("quick", **(small | overrides))

    return Study(folder, profile, reuse_training(profile()), base, task)


@pytest.fixture(autouse=True)
def _private(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests here, as on a user's machine: what was profiled once is not profiled again."""
    monkeypatch.setattr(paths, "CACHE", study.folder / "cache")
    monkeypatch.setattr(paths, "RESULTS", study.folder / "results")
    monkeypatch.setattr(paths, "RECORDED", study.folder / "results")  # times of this model, not of the recorded one


@pytest.fixture
def same(study: Study) -> str:
    """A run whose sender is its receiver: nothing may be lost."""
    return f"base <- base: {study.task}, 96 tokens"
