"""No circle: every module can be imported first, whatever has been imported before it."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LIB = Path(__file__).parents[1] / "lib"


def module_of(path: Path) -> str:
    parts = path.relative_to(LIB).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, modules: set[str]) -> set[str]:
    """The modules, and packages on the way to them, that ``source`` needs to be imported itself."""
    found: set[str] = set()
    for node in ast.parse(source).body:  # neither what functions import later nor what is for type checkers
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """By module those that are imported before it: its package is too, unless that is what imports it."""
    modules = set(sources)
    needs = {name: imported(source, modules) - {name} for name, source in sources.items()}
    for name, needed in needs.items():
        packages = {".".join(one.split(".")[:end]) for one in needed for end in range(1, one.count(".") + 1)}
        needed |= {package for package in packages if package in modules and not name.startswith(f"{package}.")}
        needed.discard(name)
    return needs


def test_nothing_imports_in_a_circle() -> None:
    sources = {module_of(path): path.read_text(encoding="utf-8") for path in (LIB / "firsttoken").rglob("*.py")}
    assert len(sources) > 200
    TopologicalSorter(graph(sources)).prepare()


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "import b", "b": "import a"},
        {"a": "from p.b import x", "p": "from p.c import y", "p.b": "", "p.c": "import a"},
    ],
)
def test_a_circle_is_found(sources: dict[str, str]) -> None:
    """Through a package, too, that imports what needs one of its modules."""
    with pytest.raises(CycleError):
        TopologicalSorter(graph(sources)).prepare()
