"""The picture that notebook 05 opens with."""

from __future__ import annotations

from firsttoken_studies.record.schematic import Schematic

COMPUTED = range(5, 8)


def schematic() -> Schematic:
    """Draw which layers of a cache a receiver takes over from a sender, and which it computes."""
    alt = (
        "A sender has read the prompt, and has keys and values of its eight layers. The receiver takes over those of "
        "layers 0 to 4. It computes layers 5 to 7 itself, from the E-cache: the hidden states that enter layer 5 in "
        "the sender."
    )
    sketch = Schematic(16.6, 6, alt)
    sketch.text(0.2, 0.45, "The receiver takes over the sender's cache, and computes one group itself", heading=True)
    sketch.text(0.2, 1.65, "sender: has read the prompt")
    sketch.text(0.2, 4.65, "receiver: is to answer")
    for layer in range(8):
        x = 6.6 + 1.2 * layer
        again = layer in COMPUTED
        sketch.box(x, 1.15, str(layer), "full reuse", width=1.1)
        sketch.box(x, 4.15, str(layer), "droidspeak" if again else "full reuse", width=1.1)
        if not again:
            sketch.arrow((x + 0.55, 2.2), (x + 0.55, 4.1), look="full reuse")
    sketch.arrow((12.6, 2.2), (12.6, 4.1), look="E-cache")
    sketch.text(12.9, 2.9, "E-cache: the hidden")
    sketch.text(12.9, 3.4, "states that enter 5")
    sketch.text(9.5, 5.6, "keys and values reused", align="center")
    sketch.text(14.4, 5.6, "computed", align="center")
    return sketch
