"""The picture that notebook 11 opens with."""

from __future__ import annotations

from math import cos, radians, sin

from firsttoken_studies.record.schematic import Schematic

DIRECTIONS = (85, 20, 75, 12, 60, 58, 55, 53, 50, -5, 70, 15)  # of the hidden state between layers, in degrees
BLOCK = range(4, 8)


def schematic() -> Schematic:
    """Draw the direction of the residual stream between layers, and the block across which it hardly turns."""
    alt = (
        "A row of layers, with an arrow between each two for the direction of the hidden state that is handed on. Most "
        "layers turn the arrow far. Across one block of four layers it hardly turns: the angle between what enters the "
        "block and what leaves it is small. These four layers wait, and come later."
    )
    sketch = Schematic(20, 8.0, alt)
    sketch.text(0.3, 0.5, "The layers that hardly turn the hidden state can wait", heading=True)
    for gap, degrees in enumerate(DIRECTIONS):
        look = "target" if gap in (BLOCK.start, BLOCK.stop) else "mark"
        _vector(sketch, 1.2 + 1.6 * gap, 2, degrees, look)
    for layer in range(len(DIRECTIONS) - 1):
        waits = layer in BLOCK
        sketch.box(1.25 + 1.6 * layer, 3.1, f"{layer + 1}", "S1" if waits else "measured", width=1.5, missing=waits)
    for x, text in ((4.4, "turn it far: stay"), (16.6, "turn it far: stay")):
        sketch.text(x, 4.6, text, align="center")
    sketch.text(10.8, 4.6, "hardly turn it: wait", align="center", heading=True)
    for gap in (BLOCK.start, BLOCK.stop):
        end = 8.2 + 2.6 * cos(radians(DIRECTIONS[gap])), 7.7 - 2.6 * sin(radians(DIRECTIONS[gap]))
        sketch.arrow((8.2, 7.7), end, look="target")
    sketch.text(10.4, 6.4, "a small angle between what enters and what leaves")
    return sketch


def _vector(sketch: Schematic, x: float, y: float, degrees: float, look: str) -> None:
    """Draw an arrow around (``x``, ``y``) in a direction."""
    right, up = 0.62 * cos(radians(degrees)), 0.62 * sin(radians(degrees))
    sketch.arrow((x - right, y + up), (x + right, y - up), look=look)
