"""What a batch costs: the shapes that are run are those that are asked for, and the summary is of them."""

from __future__ import annotations

from contextlib import closing

import pytest

from firsttoken.assets.models import load_model
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb43_the_cost_of_a_batch.study import LiveBatches, batch_cost, batch_summary

CHOSEN = {"prompt": 40, "pieces": [8, 16], "running": 3, "contexts": [6], "tile": 12, "repeats": 2}


def test_batches_are_what_was_asked_for() -> None:
    model = load_model("random:tiny").model
    blocks = LiveBatches.blocks_for(3, 10, 12, 40)
    with closing(LiveExecutor(model, blocks)) as executor:
        with closing(LiveBatches(executor, model.config.vocab_size, 3, 10, 12)) as batches:
            assert [(step.prefills, len(step.contexts)) for step in batches.decode(2)] == [((), 3)] * 2
            steps = batches.prompt(40, 16)
            assert [(step.prefills, len(step.contexts)) for step in steps] == [
                (((0, 16),), 3),
                (((16, 16),), 3),
                (((32, 8),), 3),
            ]
        with closing(LiveBatches(executor, model.config.vocab_size, 0, 0, 12)) as batches:
            assert [step.prefills for step in batches.prompt(9, 40)] == [((0, 9),)]


def test_the_experiment() -> None:
    profile = load_profile(
        "quick", model="random:tiny", dtype="float32", **{f"batch_cost.{key}": value for key, value in CHOSEN.items()}
    )
    outcome = batch_cost(profile)
    live = [row for row in outcome.rows if row["what"] == "live"]
    assert {(row["context"], row["piece"]) for row in live} == {(c, p) for c in (0, 6) for p in (8, 16, 40)}
    assert sum(row["new"] for row in live) == 2 * 2 * 3 * 40, "each prompt whole, in every case, twice"
    summary = batch_summary(outcome.rows, profile.parameters())
    alone = {piece: sum(r["ms"] for r in live if r["context"] == 0 and r["piece"] == piece) for piece in (8, 40)}
    pieces = summary.value("prefill_x", source="live", budget_tokens=8, than="whole")
    assert pieces == pytest.approx(alone[8] / alone[40])
    assert summary.of("prefill_x", source="live", case="a token past a tile", than="tile")["n"] == 2
    assert summary.value("prefill_x", source="table", budget_tokens=512, than="whole", across="worst") > 1
    assert outcome.provenance["table"]["costs"] == "yi-34b-a100"
