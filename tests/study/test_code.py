"""Which files a result hangs on, and which of them are others than at a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from firsttoken.registry import EXPERIMENTS
from firsttoken.study import code, paths


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library in a repository of its own, with one commit."""
    package = tmp_path / "lib" / "firsttoken"
    (package / "room").mkdir(parents=True)
    for folder in (package, package / "room"):
        (folder / "__init__.py").write_text("", encoding="utf-8")
    (package / "runs.py").write_text("from firsttoken.room import (\n    first,\n    second,\n)\n", encoding="utf-8")
    (package / "room" / "first.py").write_text("def late():\n    import firsttoken.third\n", encoding="utf-8")
    (package / "room" / "second.py").write_text("import os\n", encoding="utf-8")
    for name in ("third", "apart"):
        (package / f"{name}.py").write_text(f'"""{name}"""\n', encoding="utf-8")
    (package / "room" / "loop.cpp").write_text("// native\n", encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    monkeypatch.setattr(code, "_LIBRARY", tmp_path / "lib")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    code.imported.cache_clear()
    code._tree.cache_clear()
    yield tmp_path
    code.imported.cache_clear()
    code._tree.cache_clear()


def head(clone: Path) -> str:
    told = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return told.stdout.strip()


def test_what_is_imported_anywhere_counts_and_nothing_else(clone):
    names = [
        "__init__.py",
        "room/__init__.py",
        "room/first.py",
        "room/loop.cpp",
        "room/second.py",
        "runs.py",
        "third.py",
    ]
    assert code.imported("firsttoken.runs") == tuple(f"firsttoken/{name}" for name in names)


def test_a_changed_file_changes_the_digest_and_is_named(clone):
    before = code.digest("firsttoken.runs")
    assert code.changed("firsttoken.runs", head(clone)) == []
    (clone / "lib" / "firsttoken" / "apart.py").write_text("1\n", encoding="utf-8")
    assert code.digest("firsttoken.runs") == before
    (clone / "lib" / "firsttoken" / "third.py").write_text("1\n", encoding="utf-8")
    assert code.digest("firsttoken.runs") != before
    assert code.changed("firsttoken.runs", head(clone) + "-dirty") == ["firsttoken/third.py"]


def test_a_commit_that_is_not_here_says_nothing(clone):
    assert code.changed("firsttoken.runs", "0" * 40) is None
    assert code.changed("firsttoken.runs", "unknown") is None


def test_every_experiment_hangs_on_its_own_file():
    for experiment in EXPERIMENTS.values():
        assert experiment.module.replace(".", "/") + ".py" in code.imported(experiment.module)
