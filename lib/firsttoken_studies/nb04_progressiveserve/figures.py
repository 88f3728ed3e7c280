"""The picture that notebook 04 opens with."""

from __future__ import annotations

from firsttoken_studies.record.schematic import Schematic

GROUPS = "AAAAABCA"  # of the layers of a model, in which B and C come later
STAGES = {"stage 1": "A", "stage 2": "AB", "stage 3": "ABC"}
LOOKS_OF = {"A": "S1", "B": "S2", "C": "S3"}  # of the stage with which a group comes


def schematic() -> Schematic:
    """Draw the layers that are there in each of the three stages of a start."""
    alt = (
        "A model of eight layers starts in three stages. In stage 1 six layers are loaded, and a PassLayer, which "
        "hands on what enters it, stands for each of the other two: the first token comes. In stage 2 one of the two "
        "has come while the model answers, in stage 3 both, and the model is whole."
    )
    sketch = Schematic(20, 6.6, alt)
    sketch.text(0.3, 0.5, "The first token does not wait for layers B and C", heading=True)
    says = ("first token: B and C are left out", "B came while it answers", "C came: the whole model")
    for row, (stage, present) in enumerate(STAGES.items()):
        y = 1.2 + 1.5 * row
        sketch.text(0.3, y + 0.5, stage)
        for index, group in enumerate(GROUPS):
            missing = group not in present
            text = "pass" if missing else group
            sketch.box(2.4 + 1.3 * index, y, text, LOOKS_OF[group], width=1.25, missing=missing)
        sketch.text(13.1, y + 0.5, says[row], heading=row == 0)
    sketch.arrow((2.0, 1.3), (2.0, 5.3))
    sketch.text(0.3, 5.5, "time goes down")
    sketch.arrow((4.6, 6.0), (12.8, 6.0))
    sketch.text(13.1, 6.0, "a token goes through the layers")
    return sketch
