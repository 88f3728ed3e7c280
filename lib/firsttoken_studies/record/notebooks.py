"""Running the notebooks in order through papermill; the executed copies lie under ``executed/<profile>/``.

What a run showed becomes what a reader of the repository sees: outputs by cell, without papermill's own cells.
"""

import base64
import errno
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from firsttoken.study import errors as study_errors
from firsttoken.study import paths
from firsttoken.study.errors import NotebookError
from firsttoken.study.files import replacing, write_text
from firsttoken.study.storage import is_full, storing
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.record import kernel_forkserver
from firsttoken_studies.record.plot import few_colours

LAST_LINES = 12
STOP_S = 10  # given to an interrupted kernel to end by itself
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def notebook_paths(only: Iterable[str] | None = None) -> list[Path]:
    """The numbered notebooks in order, all or those whose numbers are in ``only`` ("3" and "03" are one).

    Raises NotebookError for a number that does not exist.
    """
    by_number = {path.name[:2]: path for path in sorted(paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}
    if only is None:
        return list(by_number.values())
    wanted = {number.zfill(2) if number.isdecimal() else repr(number) for number in only}
    for number in sorted(wanted - by_number.keys()):
        raise NotebookError(f"no notebook {number}; there are: {', '.join(by_number) or 'none'}")
    return [by_number[number] for number in sorted(wanted)]


def notebook_title(path: Path) -> str:
    """The first heading of a notebook, else its file name."""
    for cell in read_notebook(path)["cells"]:
        for line in "".join(cell["source"]).splitlines():
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line.removeprefix("# ").strip()
    return path.stem


def run_notebook(path: Path, profile: str) -> float:
    """Run one notebook with the parameter ``profile`` and keep the executed copy; returns the seconds it took.

    Raises NotebookError, with the last lines of the failing cell's error, when a cell fails, and StorageError when the
    copy cannot be kept. On that, and on KeyboardInterrupt, which passes through once the kernel is stopped, no copy is
    left.
    """
    folder = paths.EXECUTED / profile
    # a temporary folder of its own: who is ended in the middle leaves what it has there, such as the kernel's ports
    temporary = tempfile.TemporaryDirectory(prefix="firsttoken-run-", ignore_cleanup_errors=True)
    with (
        storing(folder),
        Stopwatch() as watch,
        temporary as private_folder,
        replacing(executed_path(path, profile)) as copy,
    ):
        # A process of its own: each notebook starts with empty memory, and Ctrl-C reaches this process alone.
        options = ["--kernel", "python3", "--cwd", str(path.parent), "--no-progress-bar", "--log-level", "CRITICAL"]
        run = subprocess.Popen(
            kernel_forkserver.command("papermill", [str(path), str(copy), "-r", "profile", profile, *options]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=kernel_forkserver.surroundings() | {"TMPDIR": private_folder},
        )
        try:
            _, complaint = run.communicate()
        except BaseException:
            _stop(run)
            raise
        if run.returncode:
            if is_full(complaint) and not _errors(copy):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise NotebookError(f"notebook {path.name} failed\n{_failure(copy, complaint)}")
    return watch.seconds


def executed_path(path: Path, profile: str) -> Path:
    """Return the path of the executed copy of a notebook."""
    return paths.EXECUTED / profile / path.name


def _stop(run: subprocess.Popen[str]) -> None:
    """End papermill, which ends its kernel; a kernel whose papermill is gone ends by itself."""
    run.terminate()
    try:
        run.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()


def _failure(copy: Path, complaint: str) -> str:
    """The error in the executed ``copy``: its message where it names the mend, else its last lines, or papermill's."""
    errors = _errors(copy)
    if errors and hasattr(study_errors, errors[-1]["ename"]):
        return f"    {errors[-1]['evalue']}"
    text = "\n".join(errors[-1]["traceback"]) if errors else complaint
    lines = [line.rstrip() for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])


def _errors(copy: Path) -> list[dict]:
    try:
        outputs = [output for cell in read_notebook(copy)["cells"] for output in cell.get("outputs", [])]
    except NotebookError:
        return []
    return [output for output in outputs if output["output_type"] == "error"]


def read_notebook(path: Path) -> dict:
    """The JSON of a notebook's file. Raises NotebookError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotebookError(f"notebook {path.name}: cannot be read ({error})") from error


def publish(path: Path, profile: str) -> None:
    """Give the notebook at ``path`` the outputs of its executed copy.

    Raises NotebookError where a cell of it was not run as it stands.
    """
    notebook, ran = read_notebook(path), read_notebook(executed_path(path, profile))
    cells = {cell.get("id"): cell for cell in ran["cells"]}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        executed_cell = cells.get(cell["id"])
        if executed_cell is None or "".join(executed_cell["source"]) != "".join(cell["source"]):
            raise NotebookError(f"notebook {path.name}: cell {cell['id']} was not run as it stands; run it again")
        compared = "nbval-ignore-output" not in cell["metadata"].get("tags", ())
        cell["outputs"] = [_small(output, compared) for output in executed_cell["outputs"]]
        cell["execution_count"] = executed_cell["execution_count"]
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
