"""What a run showed becomes what a reader of the repository sees: outputs by cell, without papermill's own cells."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from firsttoken.study.errors import NotebookError
from firsttoken.study.files import write_text
from firsttoken.study.notebooks import executed_path, read_notebook
from firsttoken.study.png import few_colours


def publish(path: Path, profile: str) -> None:
    """Give the notebook at ``path`` the outputs of its executed copy.

    Raises NotebookError where a cell of it was not run as it stands.
    """
    notebook, ran = read_notebook(path), read_notebook(executed_path(path, profile))
    cells = {cell.get("id"): cell for cell in ran["cells"]}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        found = cells.get(cell["id"])
        if found is None or "".join(found["source"]) != "".join(cell["source"]):
            raise NotebookError(f"notebook {path.name}: cell {cell['id']} was not run as it stands; run it again")
        compared = "nbval-ignore-output" not in cell["metadata"].get("tags", ())
        cell["outputs"] = [_small(output, compared) for output in found["outputs"]]
        cell["execution_count"] = found["execution_count"]
    write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _small(output: dict[str, Any], compared: bool) -> dict[str, Any]:
    """The output with its picture in few colours, and a table once: as HTML, without the same in letters, which a cell
    keeps that nbval compares with what a run gives."""
    data = dict(output.get("data", {}))
    if (picture := data.get("image/png")) is not None:
        data["image/png"] = base64.b64encode(few_colours(base64.b64decode(picture))).decode()
    if "text/html" in data and not compared:
        data.pop("text/plain", None)
    return output | {"data": data} if data else output
