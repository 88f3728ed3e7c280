"""Runs the cells of a notebook that show its mechanism, with the library as it is or with a part of it replaced."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from firsttoken.study import kernel_forkserver
from firsttoken.study.notebooks import notebook_paths
from mutants import REPORTS

TAGS = {"parameters", "imports", "mechanism", "scene", "control", "check"}
"""Cells that run in seconds; those with none of these tags run experiments, or draw what they measured."""
_LIMIT_S = 600


@dataclass(frozen=True)
class Mutation:
    """What is done to the library before the cells of ``notebook`` (its number) run, and what its check must say then.

    ``patch`` replaces something of the library, in the process that runs the cells. ``says`` is a regular expression
    that the error of the notebook matches; it names the mechanism. ``quick`` mutations are part of the unit tests.
    """

    notebook: str
    name: str
    patch: Callable[[], None]
    says: str
    quick: bool = False


def cells_of(notebook: str) -> list[str]:
    """The code of the cells of a notebook that show its mechanism, in order."""
    (path,) = notebook_paths([notebook])
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    wanted = (cell for cell in cells if cell["cell_type"] == "code" and TAGS & {*cell["metadata"].get("tags", ())})
    return ["".join(cell["source"]) for cell in wanted]


def mutations() -> list[Mutation]:
    """All of them, report by report."""
    return [one for report in REPORTS for one in importlib.import_module(f"mutants.{report}").MUTATIONS]


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
