"""What a run writes down: the code, the ledger as it stood, a summary of its own rows; and when it is refused."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from entries import entry

from firsttoken.study import paths, timing
from firsttoken.study.errors import ProfileError
from firsttoken.study.machine import machine_slug
from firsttoken.study.profile import Profile, load_profile
from firsttoken.study.summary import Summary
from firsttoken_studies.experiments import run_experiment
from firsttoken_studies.record.claims import digests, load_claims
from firsttoken_studies.record.experiment import Experiment
from firsttoken_studies.record.results import Outcome, Result, Rows, git_revision, is_clean, read_result
from firsttoken_studies.registry import EXPERIMENTS


def measured(profile: Profile) -> Outcome:
    return Outcome([{"s": 0.5}, {"s": 1.5}], provenance={"kind": "real"})


def total(rows: Rows, parameters: dict[str, Any]) -> Summary:
    summary = Summary()
    summary.add("total_s", {"value": sum(row["s"] for row in rows), "unit": "s"}, case=f"seed {parameters['seed']}")
    return summary


@pytest.fixture
def clone(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A git clone with one commit; the fixture runs git in it. "machine" is an experiment of no seconds."""
    module = types.ModuleType("made_up")
    module.measured, module.total = measured, total
    monkeypatch.setitem(sys.modules, "made_up", module)
    made = Experiment("machine", "Made up", "00", "made_up:measured", "total")
    monkeypatch.setitem(EXPERIMENTS, "machine", made)

    def git(*arguments: str) -> str:
        told = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(told, check=True, capture_output=True, text=True).stdout.strip()

    (root / ".gitignore").write_text("data/results\n.cache\n", encoding="utf-8")
    (root / "env" / "profiles" / "full.yaml").write_text((root / "env/profiles/quick.yaml").read_text("utf-8"), "utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    return git


def test_a_result_names_its_commit_the_ledger_and_a_summary_that_anybody_can_make(clone) -> None:
    result = read_result(run_experiment("machine", load_profile("full")).path)
    assert is_clean(result.git_revision) and result.git_revision == clone("rev-parse", "HEAD")
    assert result.summary == EXPERIMENTS["machine"].summarise(result.rows, result.parameters)
    assert result.summary == [entry("total_s", {"case": "seed 0"}, value=2.0, unit="s")]
    assert result.entries == digests(load_claims(paths.STUDIES, EXPERIMENTS), "machine")


def test_a_resumed_run_says_how_long_all_of_it_took(clone, monkeypatch) -> None:
    def resumed(profile: Profile) -> Outcome:
        timing.add_resumed(1000.0)
        return measured(profile)

    monkeypatch.setattr(sys.modules["made_up"], "measured", resumed)
    assert 1000 <= run_experiment("machine", load_profile("full")).duration_s < 1060
    timing.add_resumed(1.0)  # outside of a run nobody counts


@pytest.mark.parametrize("changed", ["env/profiles/quick.yaml", "data/adapters/new.json", "lib/new.py"])
def test_a_dirty_tree_gives_nothing_for_the_record(root: Path, clone, monkeypatch, changed: str) -> None:
    (root / changed).parent.mkdir(parents=True, exist_ok=True)
    with (root / changed).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert git_revision().endswith("-dirty")
    with pytest.raises(ProfileError, match=r"machine under profile full is for the record.*-dirty\); commit it, or"):
        run_experiment("machine", load_profile("full"))
    assert run_experiment("machine", load_profile("quick")).git_revision.endswith("-dirty")
    monkeypatch.setattr(paths, "RESULTS", root / "elsewhere")
    assert run_experiment("machine", load_profile("full")).path.is_relative_to(root / "elsewhere")


def test_what_an_experiment_reads_is_measured_first_and_once(root: Path, clone, monkeypatch) -> None:
    module, ran = sys.modules["made_up"], []

    def counted(profile: Profile) -> Outcome:
        ran.append(profile.seed)
        profile.used["machine"] = dict(profile.sections["machine"])
        return measured(profile)

    def doubled(profile: Profile, read: Result) -> Outcome:
        return Outcome([{"s": 2 * row["s"]} for row in read.rows])

    monkeypatch.setattr(module, "measured", counted)
    monkeypatch.setattr(module, "doubled", doubled, raising=False)
    reader = Experiment("sizes", "Reads", "00", "made_up:doubled", "total", reads=("machine",))
    monkeypatch.setitem(EXPERIMENTS, "sizes", reader)
    for _ in range(2):
        assert run_experiment("sizes", load_profile("quick")).summary.value("total_s", case="seed 0") == 4.0
    assert len(ran) == 1 and read_result(root / f"data/results/{machine_slug()}/quick/machine.json").rows
    for other in ({"machine.repeats": 7}, {"threads": 1}):
        run_experiment("sizes", load_profile("quick", **other))
    assert len(ran) == 3
