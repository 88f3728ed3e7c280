"""The controls of healing: which blocks they take, and that they run end to end."""

from __future__ import annotations

import dataclasses

import pytest

from firsttoken.progressiveserve.base_model import load_served
from firsttoken.progressiveserve.recipe import RECIPES, REPORT
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb12_staged_healing.ablations import (
    AblationConfig,
    control_blocks,
    controls_summary,
    healing_controls,
)


def test_control_blocks_are_of_one_size_and_the_random_one_lies_elsewhere(paper):
    config = paper.section("controls", AblationConfig)
    blocks = control_blocks(paper, config, load_served(paper))
    assert blocks["chosen"] == (2, 3, 4)
    assert len(blocks["random"]) == 3 and blocks["random"] != blocks["chosen"]
    assert all(block == tuple(range(block[0], block[-1] + 1)) for block in blocks.values())
    assert blocks == control_blocks(paper, config, load_served(paper))


def test_controls_run_and_keep_their_adapters_in_the_cache(paper, monkeypatch):
    monkeypatch.setitem(RECIPES, "report", dataclasses.replace(REPORT, accumulate=2))
    outcome = healing_controls(paper)
    variants = list(dict.fromkeys(row["variant"] for row in outcome.rows))
    recipe = paper.section("controls", AblationConfig).recipe
    assert variants[0] == "s0"
    assert {"chosen_none", f"chosen_{recipe}", f"one_shot_{recipe}", f"full_{recipe}", "random_none"} <= set(variants)
    assert not {"full_none", "one_shot_none"} & set(variants), "these have no unhealed counterpart of their own"
    summary = controls_summary(outcome.rows, paper.parameters())
    assert summary.of("f1_pct", stage=0)["n"] == 4
    healed = [entry["where"] for entry in summary.all("log_perplexity_recovered_pct")]
    assert healed == [{"variant": block, "recipe": recipe} for block in outcome.provenance["blocks"]]
    kept = {path.name for path in (paths.CACHE / "adapters").glob("*/*")}
    assert {"control-chosen", "control-one_shot", "control-full", "control-random"} <= kept
    assert healing_controls(paper).rows == outcome.rows
    assert outcome.provenance["blocks"]["chosen"] == [2, 3, 4]


def test_a_control_that_nobody_asks_for_is_not_trained(paper, monkeypatch):
    monkeypatch.setitem(RECIPES, "report", dataclasses.replace(REPORT, accumulate=2))
    controls = {**paper.sections["controls"], "variants": ["full"]}
    outcome = healing_controls(dataclasses.replace(paper, sections={**paper.sections, "controls": controls}))
    recipe = paper.section("controls", AblationConfig).recipe
    assert list(dict.fromkeys(row["variant"] for row in outcome.rows)) == ["s0", f"full_{recipe}"]
    assert outcome.provenance["blocks"] == {}
    controls["variants"] = ["half"]
    with pytest.raises(ProfileError, match="no control is called 'half'; known: chosen, one_shot, full"):
        dataclasses.replace(paper, sections={"controls": controls}).section("controls", AblationConfig)
