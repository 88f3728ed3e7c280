"""A picture and its slider, in a notebook that somebody looks at and in one that runs by itself."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from firsttoken.study.progress import UNSEEN
from firsttoken_studies.record.slider import turn

CELL = """
from matplotlib.figure import Figure
from firsttoken_studies.record import slider

def picture(value):
    print(f"drawn at {value}")
    fig = Figure(figsize=(2, 1))
    fig.text(0.5, 0.5, value)
    return fig

slider.turn(picture, "value", range(2, 11, 2), initial=4)
"""
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("seen", [True, False])
def test_the_picture_stays_and_the_slider_is_for_who_looks(monkeypatch, seen: bool) -> None:
    monkeypatch.delenv(UNSEEN, raising=False) if seen else monkeypatch.setenv(UNSEEN, "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, kernel_name="python3").execute()
    shown = [output.data for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    assert [[mime for mime in ("image/png", VIEW) if mime in data] for data in shown] == [["image/png"], [VIEW]][
        : 1 + seen
    ]
    states = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    sliders = [one["state"] for one in states.values() if one["model_name"] == "IntSliderModel"]
    assert [[one[key] for key in ("value", "min", "max", "step")] for one in sliders] == [[4, 2, 10, 2]][:seen]


def test_outside_a_notebook_it_is_drawn_once() -> None:
    from matplotlib.figure import Figure

    drawn = []
    turn(lambda value: drawn.append(value) or Figure(), "value", range(3), initial=1)
    assert drawn == [1]
