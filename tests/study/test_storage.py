"""A disk that is full or closed: one line with the mend, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from firsttoken.__main__ import main
from firsttoken.study import paths, storage
from firsttoken.study.errors import StorageError
from firsttoken.study.profile import load_profile
from firsttoken_studies.experiments import run_experiment
from firsttoken_studies.nb00_machine import study as roofline
from firsttoken_studies.record import notebooks
from firsttoken_studies.record.plot import save
from firsttoken_studies.record.results import load_result, write_result

SMALL = {"machine.copy_mib": 1, "machine.disk_mib": 1, "machine.matmul_n": 16, "machine.repeats": 1}


def fill(folder: Path) -> None:
    """Leave no byte free."""
    with (folder / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"\0" * 4096)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "ballast")


@pytest.fixture
def full(root: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is written goes to a disk without a free byte; the folders are there."""
    for name in ("RESULTS", "FIGURES", "EXECUTED"):
        monkeypatch.setattr(paths, name, small_disk / name.lower())
        (small_disk / name.lower() / "quick").mkdir(parents=True)
    fill(small_disk)
    return small_disk


def test_a_result_that_finds_no_room(full: Path, make_result) -> None:
    result = make_result()
    result.path.parent.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"the disk of .*results.* is full: free .* set FIRSTTOKEN_OUT to a folder"):
        write_result(result)
    assert files(full) == []


def test_a_figure_that_finds_no_room(full: Path) -> None:
    from matplotlib.figure import Figure

    with pytest.raises(StorageError, match=r"the disk of .*figures.* is full"):
        save(Figure(), "00-nothing")
    assert files(full) == []


def test_an_experiment_asks_before_it_measures(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "experiment", lambda profile: pytest.fail("measured for nothing"))
    with pytest.raises(StorageError, match="is full"):
        run_experiment("machine", load_profile("quick", **SMALL))


def test_an_executed_notebook_that_finds_no_room(
    root: Path, small_disk: Path, write_notebook, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The disk fills up while the notebook runs."""
    monkeypatch.setattr(paths, "EXECUTED", small_disk / "executed")
    write_notebook(
        "01_fills",
        f"file = open({str(small_disk / 'ballast')!r}, 'wb', buffering=0)\n"
        "try:\n    while True: file.write(bytes(4096))\nexcept OSError: print('full', 9000 * '.')",
    )
    assert main(["run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "executed" in err and "is full: free some of it, or set FIRSTTOKEN_OUT" in err
    assert files(small_disk) == []


def test_of_a_cell_that_names_the_mend_one_line_is_shown(tmp_path: Path) -> None:
    error = {"output_type": "error", "ename": "StorageError", "evalue": "no room: mend", "traceback": ["many", "lines"]}
    (tmp_path / "copy.ipynb").write_text(json.dumps({"cells": [{"outputs": [error]}]}), encoding="utf-8")
    assert notebooks._failure(tmp_path / "copy.ipynb", "") == "    no room: mend"


@pytest.mark.parametrize("variable", ["OUT", "CACHE"])
def test_a_run_that_cannot_write_stops_before_the_first_notebook(
    root: Path, variable: str, write_notebook, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    write_notebook("01_first", "1 / 0")
    closed = root / "closed"
    closed.write_text("a file where the folder should be")
    names = ("CACHE",) if variable == "CACHE" else ("EXECUTED", "RESULTS", "FIGURES")
    for name in names:
        monkeypatch.setattr(paths, name, closed / name.lower())
    assert main(["run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"Not a directory: let this user write there, or set FIRSTTOKEN_{variable} to a folder" in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk of here is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/there/file"), "the disk of /there/file is full"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "here is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/there"), "/there: Permission denied: let this user"),
        (OSError(errno.EROFS, "Read-only file system", "/there"), "/there: Read-only file system: let this user"),
    ],
)
def test_what_a_disk_refuses_is_said_in_a_line(error: Exception, message: str) -> None:
    with pytest.raises(StorageError, match=message) as raised, storage.storing(Path("here")):
        raise error
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "none", "x"), PermissionError(errno.EACCES, "a port"), ValueError("no")]
)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)), storage.storing(Path("here")):
        raise error


def test_results_that_came_with_the_code_are_read_beside_the_readers_own(
    root: Path, make_result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that cannot be written, and FIRSTTOKEN_OUT."""
    recorded = make_result()
    other = make_result(experiment="sizes")
    write_result(recorded), write_result(other)
    monkeypatch.setattr(paths, "RESULTS", root / "out" / "results")
    assert load_result("machine", machine="any") == recorded
    mine = make_result(duration_s=9.0)
    write_result(mine)
    assert load_result("machine", machine="any") == mine and load_result("sizes", machine="any") == other


def test_folders_of_the_reader_are_absolute(tmp_path: Path) -> None:
    """Notebooks run in another folder than the command line."""
    code = "from firsttoken.study import paths; print(paths.RESULTS, paths.CACHE, paths.RECORDED == paths.RESULTS)"
    library = Path(sys.modules["firsttoken"].__file__).parents[1]
    environment = {"PYTHONPATH": str(library), "FIRSTTOKEN_OUT": "out", "FIRSTTOKEN_CACHE": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [f"{tmp_path}/out/data/results", f"{library.parent}/.cache", "False"], done.stderr
