"""Runs the cells of a notebook that show its mechanism, with the library as it is or with a part of it replaced."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

from firsttoken_studies.record import kernel_forkserver
from firsttoken_studies.record.notebooks import notebook_paths
from mutants import REPORTS

TAGS = {"parameters", "imports", "mechanism", "scene", "control", "check"}
"""Cells that run in seconds; those with none of these tags run experiments, or draw what they measured."""
_LIMIT_S = 600


@dataclass(frozen=True)
class Mutation:
    """What is done to the library before the cells of ``notebook`` (its number) run, and what its check must say then.

    ``patch`` replaces something of the library, in the process that runs the cells. ``rewrite`` replaces text of the
    cells, as a reader does. ``says`` is a regular expression that the error of the notebook matches; it names the
    mechanism. ``quick`` mutations are part of the unit tests.
    """

    notebook: str
    name: str
    says: str
    patch: Callable[[], None] = lambda: None
    rewrite: tuple[str, str] | None = None
    quick: bool = False

    def cells(self) -> list[str]:
        """The cells of the notebook, with what is rewritten in them."""
        cells = cells_of(self.notebook)
        if self.rewrite is None:
            return cells
        right, wrong = self.rewrite
        assert sum(right in cell for cell in cells) == 1, f"{right!r} does not stand in one cell of {self.notebook}"
        return [cell.replace(right, wrong) for cell in cells]


Version = Callable[..., Any]
_MADE: list[Mutation] = []


def wrong(notebook: str, name: str, of: str, says: str, quick: bool = False) -> Callable[[Version], Version]:
    """Makes a mutation of what is decorated: the wrong version of ``of``, a "module:name" or a "module:Class.name".

    It is called with the right version before the arguments of a call. Nothing is imported before it is wanted: who
    had imported the right version by its name would keep it.
    """

    def made(version: Version) -> Version:
        _MADE.append(Mutation(notebook, name, says, partial(_replace, of, version), quick=quick))
        return version

    return made


def rewritten(notebook: str, name: str, right: str, wrong: str, says: str, quick: bool = False) -> None:
    """Make a mutation of a notebook's own cell: the text ``right``, which stands in one cell, becomes ``wrong``."""
    _MADE.append(Mutation(notebook, name, says, rewrite=(right, wrong), quick=quick))


def _replace(of: str, version: Version) -> None:
    module, _, path = of.partition(":")
    *outer, last = path.split(".")
    holder = reduce(getattr, outer, importlib.import_module(module))
    right = inspect.getattr_static(holder, last)

    def replaced(*given: Any, **named: Any) -> Any:
        return version(right, *given, **named)

    setattr(holder, last, property(replaced) if isinstance(right, property | cached_property) else replaced)


def cells_of(notebook: str) -> list[str]:
    """The code of the cells of a notebook that show its mechanism, in order."""
    (path,) = notebook_paths([notebook])
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    wanted = (cell for cell in cells if cell["cell_type"] == "code" and TAGS & {*cell["metadata"].get("tags", ())})
    return ["".join(cell["source"]) for cell in wanted]


def mutations() -> list[Mutation]:
    """All of them, report by report."""
    for report in REPORTS:
        importlib.import_module(f"mutants.{report}")
    return _MADE


def error_of(notebook: str, name: str = "") -> str:
    """The error, as "Class: message", that these cells end with in a process of their own; "" for none.

    The process is no copy of this one, whose other threads may hold locks: one such copy waited until CI ended.
    """
    ran = subprocess.run(
        kernel_forkserver.command("mutants", [notebook, *([name] if name else [])]),
        cwd=Path(__file__).parents[1],
        env=kernel_forkserver.surroundings(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    return json.loads(ran.stdout.splitlines()[-1]) if ran.stdout else f"status {ran.returncode}: {ran.stderr[-2000:]}"
