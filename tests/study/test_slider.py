"""A picture and its slider, in a notebook that somebody looks at and in one that runs by itself."""

from __future__ import annotations

import pytest
from jupyter_client.manager import start_new_kernel

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
DISPLAY, OPEN = "display_data", "comm_open"  # a picture, and a widget, in the messages of a kernel
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("seen", [True, False])
def test_the_picture_stays_and_the_slider_is_for_who_looks(monkeypatch, seen: bool) -> None:
    """The kernel's messages are read here and not by nbclient, which can hang beside a widget (nbclient#312)."""
    monkeypatch.delenv(UNSEEN, raising=False) if seen else monkeypatch.setenv(UNSEEN, "1")
    messages = []
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute_interactive(CELL, timeout=300, output_hook=messages.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    contents = {kind: [m["content"] for m in messages if m["msg_type"] == kind] for kind in (DISPLAY, OPEN)}
    shown = [[mime for mime in ("image/png", VIEW) if mime in content["data"]] for content in contents[DISPLAY]]
    assert shown == [["image/png"], [VIEW]][: 1 + seen]
    states = [content["data"]["state"] for content in contents[OPEN]]
    sliders = [state for state in states if state["_model_name"] == "IntSliderModel"]
    assert [[slider[key] for key in ("value", "min", "max", "step")] for slider in sliders] == [[4, 2, 10, 2]][:seen]


def test_outside_a_notebook_it_is_drawn_once() -> None:
    from matplotlib.figure import Figure

    drawn = []
    turn(lambda value: drawn.append(value) or Figure(), "value", range(3), initial=1)
    assert drawn == [1]
