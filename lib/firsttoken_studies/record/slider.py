"""A picture that follows a slider, where somebody looks at the notebook while it runs; elsewhere it stands still."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from firsttoken.study.progress import UNSEEN, kernel

if TYPE_CHECKING:
    from IPython.display import Image
    from matplotlib.figure import Figure


def turn(picture: Callable[[int], Figure], name: str, values: range, initial: int) -> None:
    """Show ``picture(initial)``, an output that stays in the notebook, and below it a slider called ``name`` over
    ``values`` that puts ``picture`` of its value in that place. An error of ``picture`` is told below the slider."""
    from IPython.display import display

    image = _drawn(picture(initial))
    if kernel() is None:
        return
    shown = display(image, display_id=True)
    if os.environ.get(UNSEEN):
        return
    from ipywidgets import IntSlider, interact

    def follow(value: int) -> None:
        shown.update(_drawn(picture(value)))

    interact(follow, value=IntSlider(initial, values[0], values[-1], values.step, description=name))


def _drawn(fig: Figure) -> Image:
    """Return ``fig`` as a PNG, drawn once. A notebook draws a figure that it shows by itself twice, once to find its
    edges."""
    import matplotlib.pyplot
    from IPython.display import Image

    png = io.BytesIO()
    fig.savefig(png, format="png", dpi="figure", pil_kwargs={"compress_level": 1})
    matplotlib.pyplot.close(fig)
    return Image(png.getvalue())
