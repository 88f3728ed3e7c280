"""The picture that notebook 06 opens with."""

from __future__ import annotations

from firsttoken_studies.record.schematic import Schematic

PARTS = ("layers 0, 1", "layers 2, 3", "layers 4, 5")


def schematic() -> Schematic:
    """Draw a token's way through a chain of servers, and what a client sends to the successor of a lost one."""
    alt = (
        "A model's layers lie on three servers, two layers on each. A client sends the state of the newest token "
        "through all three, and keeps what it sent to each. The second server is lost, with its keys and values. Its "
        "successor is sent all that the client sent to the lost one, and the answer goes on."
    )
    sketch = Schematic(20, 9.2, alt)
    sketch.text(0.2, 0.5, "Each token goes through a chain of servers, which hold the layers", heading=True)
    sketch.text(0.2, 5.2, "A server is lost: its successor is sent all that the lost one was sent", heading=True)
    for top, lost in ((1.0, False), (5.7, True)):
        for column, part in enumerate(PARTS):
            x, new = 3.4 + 6.6 * column, lost and column == 1
            sketch.box(x, top, part, "recompute" if new else "measured", width=2.9, height=1.1)
            sketch.arrow((x + 0.8, top + 2.3), (x + 0.8, top + 1.15), look="recompute" if new else "mark")
            sketch.arrow((x + 2.1, top + 1.15), (x + 2.1, top + 2.3))
            sketch.text(x + 0.6, top + 1.75, "all 4 states" if new else "1 state", align="right")
            for state in range(4):
                look = "recompute" if new else "measured" if state == 3 else "single"
                sketch.box(x + 0.73 * state, top + 2.4, "", look, width=0.7, height=0.75)
        sketch.text(0.2, top + 2.77, "client keeps")
    sketch.box(6.8, 5.7, "lost", "other", width=2.9, height=1.1, missing=True)
    return sketch
