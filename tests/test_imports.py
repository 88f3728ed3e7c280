"""The house: no circle, arrows that point one way, no class name twice.

Every module can be imported first, whatever has been imported before it."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest
from the_library import LIB, named, room_of, sources

REPORTS = {"progressiveserve", "cps", "sarathi", "droidspeak", "petals"}
FLOORS = {  # who lives on one may use all below it, and none beside it: a system never imports another
    "firsttoken": ({"study"}, {"assets", "link", "scoring"}, {"engine"}, {"simulation"}, REPORTS),
    "firsttoken_cpu": ({"lean", "native"}, {"fused", "native_attend"}, {"before_torch"}),
    "firsttoken_extras": ({"bitplanes", "layer_borrowing", "min_move_rebalancing", "vllm_cross_point"},),
    "firsttoken_studies": (
        {"choice_tasks", "probes", "stories"},
        {"record"},
        {"engine", "multiple_choice", "tricks"},
        REPORTS,
        {"combined"},
        {"trying"},
    ),
    "firsttoken_serve": (
        {"chat", "service_config", "variants"},
        {"prefixes", "retrying_server", "swarm"},
        {"served_model"},
        {"http"},
        {"commands"},
    ),
}
PACKAGES = tuple(FLOORS)  # each may import those before it, and the server, which studies start, the library alone
FLOOR = {
    (package, room): floor for package, floors in FLOORS.items() for floor, rooms in enumerate(floors) for room in rooms
}
FLOOR["firsttoken_studies", "site"] = len(FLOORS["firsttoken_studies"]) + 1  # it shows the ledger, which is at the top
FLOOR["firsttoken_studies", "commands"] = len(FLOORS["firsttoken_studies"]) + 2  # and is built by a command


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
    there = sources()
    assert len(there) > 200
    TopologicalSorter(graph(there)).prepare()


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


def against_the_arrows(sources: dict[str, str]) -> list[str]:
    """What imports a package above its own, or within its package the room of another on its own floor or above it;
    the top of a package may import all of its rooms."""
    wrong, top = [], max(map(len, FLOORS.values()))
    for module, source in sources.items():
        package, room = module.partition(".")[0], room_of(module)
        for other in (name for name in named(source) if name.split(".")[0] in PACKAGES):
            its, other_room = other.partition(".")[0], room_of(other)
            climbs = PACKAGES.index(its) > PACKAGES.index(package)
            climbs |= package == PACKAGES[-1] and its in PACKAGES[1:-1]
            if package == its and room and other_room != room:
                climbs = FLOOR.get((its, other_room), top) >= FLOOR.get((package, room), top + 1)
            if climbs:
                wrong.append(f"{module} -> {other}")
    return wrong


def test_arrows_point_one_way() -> None:
    """A folder that nobody has given a floor is at the top, which no room may import, so it is asked for one."""
    there = sources()
    assert against_the_arrows(there) == []
    folders = {path.parent for package in PACKAGES for path in (LIB / package).glob("*/*.py")}  # not what git left
    assert {(path.parent.name, room_of(f"{path.parent.name}.{path.name}")) for path in folders} <= set(FLOOR)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("firsttoken.droidspeak.store", "def f():\n    from firsttoken.progressiveserve.stages import x"),
        (
            "firsttoken.engine.engine",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import firsttoken.sarathi.a",
        ),
        ("firsttoken.study.profile", "from firsttoken import options"),
        ("firsttoken.options", "def f():\n    import firsttoken_studies.registry"),
        ("firsttoken.engine.engine", "from firsttoken_extras import layer_borrowing"),
        ("firsttoken.engine.decoder", "from firsttoken_cpu.fused import fuse"),
        ("firsttoken_serve.served_model", "from firsttoken_cpu.lean import lean_config"),
        ("firsttoken_extras.layer_borrowing.lease", "from firsttoken_studies.combined import arrival"),
        ("firsttoken_studies.cps.tables", "from firsttoken_studies.sarathi import styles"),
        ("firsttoken.assets.models", "from firsttoken.link.shaped import Link"),
    ],
)
def test_an_arrow_the_wrong_way_is_found(module: str, source: str) -> None:
    assert len(against_the_arrows({module: source})) == 1
    assert against_the_arrows({"firsttoken_studies.running": source}) == []
    assert against_the_arrows({module: "from firsttoken.study import paths"}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("firsttoken.options", "def f():\n    import firsttoken_serve.commands"),
        ("firsttoken_studies.running", "from firsttoken_serve.http import launch"),
        ("firsttoken_serve.commands", "from firsttoken_studies import registry"),
        ("firsttoken_serve.chat.text", "from firsttoken_serve.http import launch"),
    ],
)
def test_studies_start_the_server_and_neither_imports_the_other(module: str, source: str) -> None:
    assert len(against_the_arrows({module: source})) == 1


def twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """By name, without its underscore, the modules of classes that are called the same."""
    found = defaultdict(list)
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_class_name_stands_for_two_things() -> None:
    assert twice(sources()) == {}
    assert twice({"a": "class Span: pass", "b": "def f():\n    class _Span: pass"}) == {"Span": ["a", "b"]}
