"""Which functions a result hangs on, and how many of them are others than at a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from firsttoken.study import code, paths
from firsttoken_studies.registry import EXPERIMENTS


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
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for kept in (code.imported, code.functions, code._library_at):
        kept.cache_clear()


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


THIRD = '''"""third"""
ROOM = 3


class Third:
    """A class."""

    size = 1

    def told(self):
        """Of it."""
        # a comment
        return 1

    def other(self):
        return 2
'''


def test_a_changed_function_changes_the_digest_and_is_counted(clone):
    third = clone / "lib" / "firsttoken" / "third.py"
    third.write_text(THIRD, encoding="utf-8")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    before, then = code.digest("firsttoken.runs"), head(clone)
    assert code.changed("firsttoken.runs", then) == 0

    def now(text: str, **others: str) -> int:
        third.write_text(text, encoding="utf-8")
        for name, content in others.items():
            (clone / "lib" / "firsttoken" / f"{name}.py").write_text(content, encoding="utf-8")
        forget()
        changed = code.changed("firsttoken.runs", f"{then}-dirty")
        assert (code.digest("firsttoken.runs") == before) is (changed == 0)
        return changed

    assert now(THIRD, apart="1\n") == 0  # nobody imports it
    assert now(THIRD.replace("return 1", "return 3")) == 1
    assert now(THIRD.replace("ROOM = 3", "ROOM = 4").replace("size = 1", "size = 2")) == 2
    assert now(THIRD.replace("Of it.", "What it says.").replace("# a comment", "# another")) == 0
    methods = THIRD[THIRD.index("class Third") :]
    assert now("ROOM = 3\nfrom firsttoken.moved import Third\n", moved=f"import os\n{methods}") == 0


def test_native_code_counts_as_one_function(clone):
    (clone / "lib" / "firsttoken" / "room" / "loop.cpp").write_text("// another\n", encoding="utf-8")
    assert code.changed("firsttoken.runs", head(clone)) == 1


def test_a_commit_that_is_not_here_says_nothing(clone):
    assert code.changed("firsttoken.runs", "0" * 40) is None
    assert code.changed("firsttoken.runs", "unknown") is None


def test_every_experiment_hangs_on_its_own_file():
    for experiment in EXPERIMENTS.values():
        assert experiment.module.replace(".", "/") + ".py" in code.imported(experiment.module)
