"""The picture that notebook 06 opens with."""

from __future__ import annotations

from firsttoken_studies.record.schematic import Schematic

PARTS = ("layers 0, 1", "layers 2, 3", "layers 4, 5")


def schematic() -> Schematic:
    """Draw a token's way through a chain of servers, and what a client sends to the successor of a lost one."""
    alt = (
        "A model's layers lie on three servers, two layers on each. A client sends the state of the newest token to "
        "the first server; what leaves a server enters the next, and the client keeps a copy of all that entered each. "
        "The second server is lost, with its keys and values. Its successor is sent all four states that entered the "
        "lost one, and the answer goes on."
    )
    sketch = Schematic(20, 9.4, alt)
    sketch.text(
        0.2, 0.5, "A token's state goes from server to server; the client keeps what entered each", heading=True
    )
    sketch.text(0.2, 5.2, "A server is lost: its successor is sent all that entered the lost one", heading=True)
    for top, lost in ((1.1, False), (5.8, True)):
        sketch.text(0.2, top + 0.55, "client", heading=True)
        sketch.text(0.2, top + 2.4, "it keeps")
        for column, part in enumerate(PARTS):
            x, new = 4.0 + 5.4 * column, lost and column == 1
            sketch.box(x, top, part, "recompute" if new else "measured", width=3.2, height=1.1)
            if new:
                sketch.arrow((x + 1.6, top + 1.95), (x + 1.6, top + 1.15), look="recompute")
                sketch.text(x + 1.9, top + 1.55, "all 4 states, to the successor")
            else:
                sketch.arrow((2.0 if column == 0 else x - 2.2, top + 0.55), (x, top + 0.55), "1 state")
            for state in range(4):
                look = "recompute" if new else "measured" if state == 3 else "single"
                sketch.box(x + 0.8 * state, top + 2, "", look, width=0.77, height=0.75)
        sketch.arrow((17.99, top + 0.55), (19.6, top + 0.55))
    return sketch
