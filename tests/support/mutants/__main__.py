"""``python -m mutants NOTEBOOK [NAME]``: runs the cells of a notebook that show its mechanism.

With NAME, the mutation of that name is made first. The last line of the output is the error, as a JSON string.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys

import matplotlib
import torch

from firsttoken.study import paths
from mutants.running import cells_of, mutations


def error_of(notebook: str, name: str = "") -> str:
    """The error, as "Class: message", that the cells end with; "" for none."""
    space: dict[str, object] = {"__name__": "__main__"}
    try:
        cells = cells_of(notebook)
        if name:
            (mutation,) = (one for one in mutations() if (one.notebook, one.name) == (notebook, name))
            mutation.patch()
            cells = mutation.cells()
        for number, code in enumerate(cells):
            source, file = re.sub(r"(?m)^%.*$", "", code), f"notebook {notebook}, cell {number}"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            exec(compile(source, file, "exec"), space)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    matplotlib.use("Agg")
    torch.set_num_threads(1)  # two processes of tests share the cores
    os.chdir(paths.NOTEBOOKS)
    said = error_of(*sys.argv[1:])
    print("\n" + json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # a wrong mechanism may have left threads that wait
