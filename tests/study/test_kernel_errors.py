"""Errors in a real kernel: one line for what a reader can mend, and its cause behind cells that come after it."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from firsttoken.study import paths
from firsttoken_studies.record import show

CELLS = ("study = show.header('quik')", "print(study.name)", "print(1)")


@pytest.fixture(scope="module")
def shown() -> list[list]:
    """The outputs of the cells, each of which runs although the one before it failed."""
    notebook = nbformat.v4.new_notebook()
    cells = ("from firsttoken_studies.record import show", *CELLS)
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    NotebookClient(notebook, allow_errors=True, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells[1:]]


def test_what_a_reader_can_mend_is_one_line(shown) -> None:
    (error,) = (output for output in shown[0] if output.output_type == "error")
    assert len(error.traceback) == 1 and error.traceback[0].startswith("firsttoken: no profile 'quik'; known: ")


def test_a_cell_behind_it_names_the_cause_in_its_last_line(shown) -> None:
    error, told = shown[1]
    assert error.ename == "NameError"
    assert told.text.endswith("did you mean 'quick'?)\n") and "ProfileError: no profile 'quik'" in told.text


def test_other_cells_go_on(shown) -> None:
    assert [output.text for output in shown[2]] == ["1\n"]


def test_cells_out_of_order_say_what_to_run_first() -> None:
    notebook = nbformat.v4.new_notebook()
    texts = ("from firsttoken_studies.record import show", "study = show.header('quick')", "print(now.rows)", "now = 1")
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in texts]
    NotebookClient(notebook, allow_errors=True, kernel_name="python3").execute()
    error, told = notebook.cells[2].outputs
    assert error.evalue == "name 'now' is not defined"
    assert told.text.endswith("run that first: Run > Run All Above Selected Cell.\n")


def test_a_notebook_runs_from_another_folder(tmp_path) -> None:
    """As a copy, started where neither the library nor the data lie."""
    notebook = nbformat.read(next(paths.NOTEBOOKS.glob("45_*.ipynb")), as_version=4)
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_cache_says_what_to_fetch(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    show.header("quick")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("missing   smollm2-135m") and "run `firsttoken fetch` first" in last
