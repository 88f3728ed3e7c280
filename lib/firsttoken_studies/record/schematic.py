"""Pictures of an idea, before any number: boxes, arrows and words in one style, with a text that can be read aloud."""

from __future__ import annotations

from pathlib import Path

from firsttoken_studies.record import plot
from firsttoken_studies.record.plot import LOOKS, panels

PICTURE_WIDTH_IN = 9.0


class Schematic:
    """A drawing area of ``width`` by ``height`` units, whose origin is at the top left; a box is one unit high.

    ``alt`` says in whole sentences what the picture shows, for readers who hear the page: it stands below the picture.
    """

    def __init__(self, width: float, height: float, alt: str) -> None:
        self.alt = alt
        self.scale = PICTURE_WIDTH_IN / width
        self.figure, self.axes = panels(figsize=(PICTURE_WIDTH_IN, self.scale * height), layout="none")
        self.figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def box(
        self,
        x: float,
        y: float,
        text: str = "",
        look: str = "other",
        width: float = 1.0,
        height: float = 1.0,
        missing: bool = False,
    ) -> None:
        """Draw a box with its left upper corner at (``x``, ``y``), in the colour of ``look``; dashed and empty where it
        stands for what is ``missing``."""
        from matplotlib.colors import to_rgb
        from matplotlib.patches import FancyBboxPatch

        colour = LOOKS[look].colour
        red, green, blue = to_rgb(colour)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        gap = 0.04
        self.axes.add_patch(
            FancyBboxPatch(
                (x + gap, y + gap),
                width - 2 * gap,
                height - 2 * gap,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor="white" if missing else colour,
                edgecolor=colour,
                linestyle="--" if missing else "-",
                linewidth=1.4,
            )
        )
        colour_of_text = "black" if missing or not dark else "white"
        self.axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=colour_of_text, fontsize=10)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], text: str = "", look: str = "mark") -> None:
        """Draw an arrow from ``start`` to ``end``, with ``text`` above its middle."""
        properties = {"arrowstyle": "-|>", "color": LOOKS[look].colour, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops=properties)
        if text:
            middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.12
            self.axes.text(*middle, text, ha="center", va="bottom", fontsize=9.5)

    def text(self, x: float, y: float, text: str, align: str = "left", heading: bool = False) -> None:
        """Write ``text`` at the height ``y``, from, around or up to ``x``."""
        weight = "bold" if heading else "normal"
        self.axes.text(x, y, text, ha=align, va="center", fontsize=11 if heading else 10, fontweight=weight)

    def save(self, name: str) -> Path:
        """Write the picture as ``plot.save`` does, and print what it shows."""
        path = plot.save(self.figure, name)
        print(self.alt)
        return path
