"""The picture that notebook 20 opens with."""

from __future__ import annotations

from firsttoken_studies.record.schematic import Schematic

LOOK_OF = {"A": "swap", "B": "coalesced", "C": "prefill first"}


def schematic() -> Schematic:
    """Draw one step of the engine: which tokens run, the pool of blocks that they read and write, what comes out."""
    alt = (
        "One step of the engine. The scheduler lets one token each of the requests A and B run, and five tokens of "
        "the prompt of C. They go through all layers together, and read and write the cache: blocks of one pool, where "
        "those of a request lie anywhere. Out comes one new token for each of the three requests."
    )
    sketch = Schematic(20, 7.6, alt)
    sketch.text(0.2, 0.5, "1  The scheduler: which tokens run", heading=True)
    sketch.text(8.1, 0.5, "2  One pass, all together", heading=True)
    sketch.text(15.4, 0.5, "3  A token each", heading=True)
    for row, (request, tokens) in enumerate({"A": 1, "B": 1, "C": 5}.items()):
        for token in range(tokens):
            sketch.box(0.2 + token, 1.2 + 1.1 * row, request, LOOK_OF[request])
        sketch.box(16.2, 1.2 + 1.1 * row, request, LOOK_OF[request])
    sketch.text(1.5, 1.7, "generates")
    sketch.text(1.5, 2.8, "generates")
    sketch.text(5.4, 3.9, "prompt")
    sketch.box(8.6, 1.2, "all layers\nof the model", "other", width=4.6, height=3.2)
    sketch.arrow((7.2, 2.8), (8.5, 2.8))
    sketch.arrow((13.3, 2.8), (16.0, 2.8))
    sketch.arrow((10.5, 4.4), (10.5, 5.3))
    sketch.arrow((11.3, 5.3), (11.3, 4.4))
    for block, request in enumerate("A.CBA..CB.AC.B.A"):
        taken = request in LOOK_OF
        sketch.box(2.8 + block, 5.3, request if taken else "", LOOK_OF.get(request, "other"), missing=not taken)
    sketch.text(10.9, 6.8, "the cache: blocks of one pool, a request's lie anywhere", align="center")
    return sketch
