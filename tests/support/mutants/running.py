"""Runs the cells of a notebook that show its mechanism, with the library as it is or with a part of it replaced."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.study import paths
from firsttoken.study.notebooks import notebook_paths

TAGS = {"parameters", "imports", "mechanism", "scene", "control", "check"}
"""Cells that run in seconds; those with none of these tags run experiments, or draw what they measured."""


@dataclass(frozen=True)
class Mutation:
    """What is done to the library before the cells of ``notebook`` (its number) run, and what its check must say then.

    ``patch`` replaces something of the library in this process. ``says`` is a regular expression that the error of the
    notebook matches; it names the mechanism. ``quick`` mutations are part of the unit tests.
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


def error_of(notebook: str, patch: Callable[[], None] | None = None) -> str:
    """The error, as "Class: message", that these cells end with in a process of their own; "" for none."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(notebook, patch, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return f"the process ended with {process.exitcode}"
    finally:
        process.join(10)
        process.kill()


def _run(notebook: str, patch: Callable[[], None] | None, said: multiprocessing.connection.Connection) -> None:
    import matplotlib

    matplotlib.use("Agg")
    os.chdir(paths.NOTEBOOKS)
    space: dict[str, object] = {"__name__": "__main__"}
    try:
        if patch is not None:
            patch()
        for code in cells_of(notebook):
            exec(compile(re.sub(r"(?m)^%.*$", "", code), f"notebook {notebook}", "exec"), space)
        said.send("")
    except BaseException as error:
        said.send(f"{type(error).__name__}: {error}")
