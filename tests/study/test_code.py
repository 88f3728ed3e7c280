"""Which functions a result hangs on, and how many of them are others than at a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from firsttoken.study import paths
from firsttoken_studies.record import code
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
    (package / "room" / "sums.h").write_text("+ i\n", encoding="utf-8")
    (package.parent / "firsttoken_serve").mkdir()
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    commit(tmp_path)
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


def commit(clone: Path) -> None:
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)


def test_what_is_imported_anywhere_counts_and_nothing_else(clone):
    names = [
        "__init__.py",
        "room/__init__.py",
        "room/first.py",
        "room/loop.cpp",
        "room/second.py",
        "room/sums.h",
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
    commit(clone)
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
    elsewhere = {"moved": "", "../firsttoken_serve/moved": methods}
    assert now("ROOM = 3\nfrom firsttoken_serve.moved import Third\n", **elsewhere) == 0


FUNCTION = """
def mean(rows, *rest, scale=1, **others):
    total: float = 0
    def add(value, /):
        nonlocal total
        total += value
    for line in rows:
        try:
            add(sum(cell * scale for cell in line if cell not in rest))
        except OSError as error:
            print(error, others)
    count = (number := len(rows)) + 1
    return total / count, number, lambda key: key + count
"""
KEYWORDS = "def pair(a, b):\n    return a - b\n\n\ndef call(x):\n    return pair(1, b=x)\n"
FIELDS = "@dataclass(frozen=True)\nclass Pair:\n    first: int\n    second: Annotated[int, least(0)] = 1\n"
READER = "def held():\n    size = 1\n    return locals()\n"


@pytest.mark.parametrize(
    ("text", "edits", "changes"),
    [
        (FUNCTION, {"total": "amount", "value": "total", "line": "row", "cell": "line", "number": "many"}, 0),
        (FUNCTION, {"rest": "left_out", "others": "options", "error": "fault", "key": "entry"}, 0),
        (FUNCTION, {": float = 0": " = 0", "rows:": "rows:  # all", "    count": '    "a text"\n    count'}, 0),
        (FUNCTION, {"*rest, scale=1": "*rest: int, scale: int = 1"}, 0),
        (FUNCTION, {"return total / count": "return count / total"}, 1),  # swapped
        (FUNCTION, {"total / count": "amount / count"}, 1),  # forgotten
        (FUNCTION, {"count": "number"}, 1),  # merged
        (FUNCTION, {"line": "rows"}, 1),  # merged with a parameter
        (FUNCTION, {"nonlocal total": "total = 0"}, 1),
        (FUNCTION, {"cell *": "line *"}, 1),
        (FUNCTION, {"scale": "factor"}, 1),  # **others would take what calls it by its old name
        (FUNCTION, {"len(": "max("}, 1),
        (KEYWORDS, {"a, b": "c, b", "a - b": "c - b"}, 0),
        (KEYWORDS, {"a, b": "a, c", "a - b": "a - c", "b=x": "c=x"}, 2),  # with its call, which names it
        (KEYWORDS, {"a, b": "b, a", "a - b": "b - a"}, 1),
        (KEYWORDS, {"b=x": "a=x"}, 1),
        (FIELDS, {"first": "third"}, 1),
        (FIELDS, {"least(0)": "least(1)"}, 1),
        (FIELDS, {"frozen=True": ""}, 1),
        (READER, {"size": "length"}, 1),
    ],
)
def test_names_of_locals_are_no_part_of_a_function(clone, text, edits, changes):
    third = clone / "lib" / "firsttoken" / "third.py"
    third.write_text(text, encoding="utf-8")
    commit(clone)
    before = code.digest("firsttoken.runs")
    edited = text
    for old, new in edits.items():
        assert old in edited
        edited = edited.replace(old, new)
    third.write_text(edited, encoding="utf-8")
    forget()
    assert code.changed("firsttoken.runs", head(clone)) == changes
    assert code.digest("firsttoken.runs") != before or changes == 0


def test_native_code_counts_with_its_headers_each_file_as_one_function(clone):
    room = clone / "lib" / "firsttoken" / "room"
    before = code.digest("firsttoken.runs")
    (room / "sums.h").write_text("+ 0 * i\n", encoding="utf-8")
    forget()
    assert code.changed("firsttoken.runs", head(clone)) == 1
    assert code.digest("firsttoken.runs") != before
    (room / "loop.cpp").write_text("// another\n", encoding="utf-8")
    forget()
    assert code.changed("firsttoken.runs", head(clone)) == 2


def test_a_commit_that_is_not_here_says_nothing(clone):
    assert code.changed("firsttoken.runs", "0" * 40) is None
    assert code.changed("firsttoken.runs", "unknown") is None


def test_every_experiment_hangs_on_its_own_file():
    for experiment in EXPERIMENTS.values():
        assert experiment.module.replace(".", "/") + ".py" in code.imported(experiment.module)
