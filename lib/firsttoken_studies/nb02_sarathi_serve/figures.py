"""The picture that notebook 02 opens with."""

from __future__ import annotations

from firsttoken_studies.record.schematic import Schematic

DECODES = "ABC"


def schematic() -> Schematic:
    """Draw the steps of two schedulers when a long prompt comes: read whole, and cut into chunks."""
    alt = (
        "Time runs to the right, each column is a step, and each row is a request. A, B and C have a token in each "
        "step when a prompt P comes. Prefill first reads P whole in one long step, in which A, B and C have no token. "
        "Stall-free batching cuts P into four chunks: a step holds one chunk and a token of A, B and C each, and takes "
        "longer than a step of decodes alone. P has its own first token later."
    )
    sketch = Schematic(22, 11.6, alt)
    prefill_first_steps = [(1.5, True, ""), (1.5, True, ""), (7, False, "P, whole"), *[(1.5, True, "P")] * 5]
    chunks = [(2.6, True, f"P, {n} of 4") for n in (1, 2, 3, 4)]
    stall_free_steps = [*[(1.5, True, "")] * 2, *chunks, *[(1.5, True, "P")] * 3]
    for top, heading, steps in (
        (0.5, "Prefill first: P is read whole in a step of its own, and A, B and C wait", prefill_first_steps),
        (6.2, "Stall-free: a chunk of P in the same step as a token of A, B and C", stall_free_steps),
    ):
        sketch.text(0.2, top, heading, heading=True)
        x = 1.6
        for width, decodes, text in steps:
            for row, name in enumerate(DECODES if decodes else ""):
                sketch.box(x, top + 0.5 + row, name, "measured", width=width)
            if text:
                sketch.box(x, top + 3.5, text, "measured" if text == "P" else "prefill", width=width)
            x += width + 0.15
        for row, name in enumerate([*DECODES, "P"]):
            sketch.text(0.5, top + 1 + row, name)
        sketch.arrow((1.6, top + 4.8), (19.4, top + 4.8))
        sketch.text(19.6, top + 4.8, "time")
    return sketch
