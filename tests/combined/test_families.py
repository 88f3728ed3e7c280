"""Families of models: what the summary says of rows that are known."""

from __future__ import annotations

import math

import pytest

from firsttoken.study.errors import StageError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb11_which_layers_can_wait.families import (
    ANSWERING,
    BY_DISTANCE,
    BY_LOSS,
    EIGHT,
    FIRST_BITS,
    WHOLE,
    families,
    families_summary,
)

LOST = {WHOLE: 1.0, BY_DISTANCE: 4.0, BY_LOSS: 2.0, FIRST_BITS: 1.1, EIGHT: 1.005}


def rows_of(model: str) -> list[dict]:
    """Blocks of which the second turns least and the third loses least, four windows, and one task."""
    blocks = [(0.3, 9.0), (0.1, 4.0), (0.2, 2.0)]
    rows = [
        {"model": model, "what": "block", "start": at, "size": 2, "distance": distance, "text_nll": loss}
        for at, (distance, loss) in enumerate(blocks)
    ]
    rows += [
        {"model": model, "what": "text", "variant": name, "window": at, "text_nll": at + loss}
        for name, loss in LOST.items()
        for at in range(4)
    ]
    chosen = {WHOLE: [0, 1, 1, 1], BY_LOSS: [0, 0, 0, 0], EIGHT: [0, 1, 1, 0]}
    return rows + [{"model": model, "task": "sciq", "variant": name, "chosen": chosen[name]} for name in ANSWERING]


def test_each_family_has_its_own_numbers() -> None:
    rows = [{"task": "sciq", "right": [0, 1, 1, 0]}, *rows_of("one"), *rows_of("two")]
    summary = families_summary(rows, {"families": {"models": ["one", "two"]}})
    for model in ("one", "two"):
        assert summary.value("chosen_start", model=model, variant=BY_DISTANCE) == 1
        assert summary.value("chosen_start", model=model, variant=BY_LOSS) == 2
        assert summary.value("perplexity", model=model, variant=WHOLE) == pytest.approx(math.exp(2.5))
        lost = summary.of("perplexity_lost_pct", model=model, variant=EIGHT, than=WHOLE)
        assert [lost[key] for key in ("value", "low", "high")] == pytest.approx([100 * math.expm1(0.005)] * 3)
        places = {"model": model, "than": WHOLE, "task": "sciq"}
        assert summary.value("accuracy_pct", model=model, variant=WHOLE, task="sciq") == 75
        assert summary.value("accuracy_change", variant=BY_LOSS, **places) == -25
        assert summary.value("accuracy_change", variant=EIGHT, **places) == 25


@pytest.mark.assets
def test_a_model_that_reads_no_text_is_refused() -> None:
    tiny = {"families.models": ["random:tiny-2"], "families.tasks": ["winogrande 1"]}
    with pytest.raises(StageError, match=r"^model random:tiny-2 has no tokenizer, and its quality is judged on text"):
        families(load_profile("quick", **tiny))
