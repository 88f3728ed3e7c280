"""The markdown cells of a notebook that state results: written from a template, as the pages are.

A template, ``data/templates/notebooks/NN.md``, has a part for each such cell, headed by ``<!-- cell: ID -->``. All
other cells are edited in the notebook.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError
from firsttoken.study.notebooks import notebook_paths, read_notebook

_HEAD = re.compile(r"^<!-- cell: (\S+) -->\n", re.MULTILINE)


def templates() -> dict[Path, Path]:
    """Each notebook that has a template, with it. Raises NotebookError for a template without a notebook."""
    found = {template.stem: template for template in sorted((paths.TEMPLATES / "notebooks").glob("*.md"))}
    return dict(zip(notebook_paths(found), found.values(), strict=True)) if found else {}


def parts(text: str) -> dict[str, str]:
    """The markdown of each cell that ``text``, a template or what it gives, has a part for, by the cell's id."""
    before, *rest = _HEAD.split(text)
    if before.strip():
        raise ClaimsError(f"text before the first `<!-- cell: ID -->`: {before.strip()[:40]!r}")
    return {cell: part.strip() for cell, part in zip(rest[::2], rest[1::2], strict=True)}


def filled(notebook: Path, text: str) -> str:
    """The file ``notebook`` with the cells of ``text`` in place of its own.

    Raises ClaimsError for a cell that it does not have as markdown, and NotebookError for a file that cannot be read.
    """
    content = read_notebook(notebook)
    cells = {cell["id"]: cell for cell in content["cells"] if cell["cell_type"] == "markdown"}
    for name, markdown in parts(text).items():
        if name not in cells:
            raise ClaimsError(f"{notebook.name} has no markdown cell {name!r}; there are: {', '.join(cells)}")
        cells[name]["source"] = markdown.splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
