"""The modules under ``lib``: their text, who imports whom, and how they stand on each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

LIB = Path(__file__).parents[2] / "lib"
_ROOMS = {  # by a notebook's number, or the first digit of it, the room of whose studies its folder is a part
    "0": "record", "1": "progressiveserve", "2": "cps", "20": "engine", "3": "droidspeak", "4": "sarathi",
    "47": "combined", "48": "combined", "5": "petals", "56": "combined", "6": "combined", "9": "record",
}  # fmt: skip
_ELSEWHERE = {  # modules that use another report than their notebook's
    "firsttoken_studies.nb11_which_layers_can_wait.families_trained": "combined",
}


def module_of(path: Path) -> str:
    """The dotted name of the module in a file."""
    parts = path.relative_to(LIB).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The folder in the package of a module, "" at its top; a notebook's folder is a part of its report's."""
    room = [*module.split("."), ""][1]
    if room[:2] == "nb":
        return _ELSEWHERE.get(module) or _ROOMS.get(room[2:4]) or _ROOMS[room[2]]
    return room


def is_folder(module: str) -> bool:
    """Whether a module is a folder with its ``__init__``."""
    return LIB.joinpath(*module.split(".")).is_dir()


@cache
def sources() -> dict[str, str]:
    """The text of every module by its name."""
    return {module_of(path): path.read_text(encoding="utf-8") for path in sorted(LIB.rglob("*.py"))}


def named(source: str) -> set[str]:
    """All that is imported anywhere in ``source``: in functions and for type checkers, too."""
    nodes = list(ast.walk(ast.parse(source)))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def imported_anywhere() -> dict[str, frozenset[str]]:
    """By module the modules that it names in an import, wherever that stands."""
    modules = set(sources())
    return {
        module: frozenset({name if name in modules else name.rpartition(".")[0] for name in named(source)} & modules)
        - {module}
        for module, source in sources().items()
    }


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The groups of modules that all lead to each other."""
    reached = {start: _behind(start, graph) for start in graph}
    found = [{other for other in reached[one] if one in reached.get(other, ())} for one in graph if one in reached[one]]
    return [group for at, group in enumerate(found) if group not in found[:at]]


def _behind(start: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
    seen, left = set[str](), list(graph[start])
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            left += graph.get(name, ())
    return seen


def behind(start: str) -> set[str]:
    """The modules that ``start`` imports, directly or through others, and itself."""
    return _behind(start, imported_anywhere()) | {start}


def floors(modules: Iterable[str], graph: Mapping[str, Iterable[str]]) -> int:
    """How many of ``modules`` stand on each other at most; these form no circle."""
    within = set(modules)

    @cache
    def height(module: str) -> int:
        return 1 + max((height(below) for below in graph[module] if below in within), default=0)

    return max(map(height, within))


def rooms() -> dict[str, list[str]]:
    """The modules of each folder of a package, its own folders included, and those at its top."""
    found = defaultdict(list)
    for module in sources():
        package = module.partition(".")[0]
        is_room = module.count(".") > 1 or (module != package and is_folder(module))
        found[f"{package}.{room_of(module)}" if is_room else package].append(module)
    return dict(found)
