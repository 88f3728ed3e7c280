"""A figure stands in the notebook that draws it, whatever the environment says of backends."""

from __future__ import annotations

import pytest

CODE = """
import matplotlib.pyplot as plt
from firsttoken_studies.record import plot
plot.style()
fig, ax = plt.subplots(figsize=(2, 1))
ax.plot([1, 2])
plot.save(fig, "shown");
"""


@pytest.mark.parametrize("backend", ["Agg", "pdf", None])
def test_a_notebook_shows_each_figure_once(tmp_path, monkeypatch, backend: str | None) -> None:
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    monkeypatch.setenv("FIRSTTOKEN_OUT", str(tmp_path))
    if backend is None:
        monkeypatch.delenv("MPLBACKEND", raising=False)
    else:
        monkeypatch.setenv("MPLBACKEND", backend)
    notebook = new_notebook(cells=[new_code_cell(CODE)])
    NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    shown = [output for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    assert len(shown) == 1 and "image/png" in shown[0].data
    assert (tmp_path / "figures" / "shown.png").stat().st_size
