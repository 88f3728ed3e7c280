"""The picture that notebook 02 opens with."""

from __future__ import annotations

from firsttoken_studies.record.schematic import Schematic

DECODES = "ABC"


def schematic() -> Schematic:
    """Draw the steps of two schedulers when a long prompt comes: read whole, and cut into chunks."""
    alt = (
        "Three requests, A, B and C, have a token in each step. A prompt P comes. Prefill first reads P whole in one "
        "long step, in which A, B and C have no token. Stall-free batching cuts P into chunks, and in each step a "
        "chunk stands beside the tokens of A, B and C."
    )
    sketch = Schematic(22, 9.4, alt)
    sketch.text(0.2, 0.5, "Prefill first: the prompt P is read whole, and A, B and C wait", heading=True)
    sketch.text(0.2, 5.2, "Stall-free: a chunk of P in each step, and A, B and C never wait", heading=True)
    for row, name in enumerate(DECODES):
        for x in (1, 14, 15.6, 17.2):
            sketch.box(x, 1 + row, name, "measured", width=1.5)
        for x in (1, 2.6, 5.8, 9, 12.2, 15.6, 17.2):
            sketch.box(x, 5.7 + 0.8 * row, name, "measured", width=1.5, height=0.8)
    for chunk in range(4):
        sketch.box(4.1 + 3.2 * chunk, 5.7, f"P, {chunk + 1} of 4", "prefill", width=1.6, height=2.4)
    sketch.box(2.6, 1, "P, whole", "prefill", width=11.3, height=3)
    sketch.arrow((1, 4.4), (19.4, 4.4))
    sketch.arrow((1, 8.6), (19.4, 8.6))
    sketch.text(19.6, 4.4, "time")
    sketch.text(19.6, 8.6, "time")
    return sketch
