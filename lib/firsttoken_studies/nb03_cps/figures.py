"""The picture that notebook 03 opens with."""

from __future__ import annotations

from firsttoken.simulation.costs.published import TABLE_2
from firsttoken_studies.record.schematic import Schematic

SHORT, LONG = TABLE_2[0], TABLE_2[2]


def schematic() -> Schematic:
    """Draw both ways back of a short and of a long request, as long as they take in Table 2."""
    alt = (
        "When memory is full, a request is preempted and gives up its KV cache. It comes back in one of two ways. Swap "
        "copies the cache out to host memory and later in again. Recompute computes its tokens again. For a short "
        "request of 512 tokens swap takes less time, for a long one of 2,048 tokens recompute does."
    )
    sketch = Schematic(22, 9.6, alt)
    for y, row, heading in (
        (0.5, SHORT, f"A short request is preempted, {SHORT.tokens} tokens: swap costs less"),
        (5, LONG, f"A long one is preempted, {LONG.tokens:,} tokens: recompute costs less"),
    ):
        scale = 0.4  # units a millisecond
        out, back, again = (scale * ms for ms in (row.out_ms, row.prep_ms + row.in_ms, row.recompute_ms))
        sketch.text(0.2, y, heading, heading=True)
        sketch.text(3.2, y + 1.3, "swap", align="right")
        sketch.box(3.5, y + 0.7, "out", "swap", width=out, height=1.2)
        sketch.box(3.5 + out, y + 0.7, "in", "swap", width=back, height=1.2)
        sketch.text(3.8 + out + back, y + 1.3, f"{row.swap_ms:.1f} ms")
        sketch.text(3.2, y + 2.7, "recompute", align="right")
        sketch.box(3.5, y + 2.1, "compute again", "recompute", width=again, height=1.2)
        sketch.text(3.8 + again, y + 2.7, f"{row.recompute_ms:.1f} ms")
    sketch.arrow((3.5, 8.9), (19.5, 8.9))
    sketch.text(19.8, 8.9, "time")
    return sketch
