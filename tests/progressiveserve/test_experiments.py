"""The experiments end to end, on the paper profile's path: a Llama folder, a SQuAD file and a TriviaQA file."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from firsttoken.assets.adapter_files import WEIGHTS, read_recipe
from firsttoken.progressiveserve import training
from firsttoken.progressiveserve.recipe import OURS, RECIPES, REPORT, TASK
from firsttoken.study.errors import ProfileError, StageError
from firsttoken.study.profile import Profile
from firsttoken_studies.experiments import run_experiment
from firsttoken_studies.progressiveserve import layers as experiments
from firsttoken_studies.progressiveserve.layers import (
    LOGITS,
    DistanceConfig,
    distance_summary,
    healing_live,
    healing_training,
    layer_distance,
    live_summary,
    stage_quality,
    stage_summary,
)
from firsttoken_studies.record.results import read_result

PLACES = {
    "s0": {"stage": 0},
    "s1_none": {"stage": 1, "recipe": "none"},
    "s1_report": {"stage": 1, "recipe": "report"},
    "s2_none": {"stage": 2, "recipe": "none"},
    "s2_report": {"stage": 2, "recipe": "report"},
    "s3": {"stage": 3},
}
VARIANTS = list(PLACES)


def changed(profile: Profile, **sections: dict) -> Profile:
    """The profile with some keys of some sections replaced."""
    merged = {name: dict(profile.sections[name]) | keys for name, keys in sections.items()}
    return dataclasses.replace(profile, sections=dict(profile.sections) | merged)


def untimed(rows: list[dict]) -> list[dict]:
    """The rows without how long they took."""
    return [{key: value for key, value in row.items() if key not in ("compute_s", "train_s")} for row in rows]


def test_the_report_from_training_to_the_table(paper, tmp_path, monkeypatch):
    result = run_experiment("healing_training", paper)
    assert result.profile == "paper" and read_result(result.path).rows == result.rows
    places = [(entry["measure"], entry["where"]) for entry in result.summary]
    assert places == [("train_s", {"stage": stage, "recipe": "report"}) for stage in (1, 2)]
    for letters, layers in (("A", [0, 1, 5]), ("AB", [0, 1, 2, 3, 5])):
        recipe = read_recipe(tmp_path / "adapters" / f"{letters}-report")
        assert recipe["layers"] == layers
        assert recipe["recipe"]["name"] == "report" and recipe["recipe"]["rank"] == REPORT.rank
        assert recipe["steps"] == len(recipe["curve"]) == 1
        assert "validation_f1" in recipe["curve"][-1]

    assert not [path for path in (tmp_path / "adapters").glob("*/*.json") if str(tmp_path) in path.read_text()]
    weights = {path: path.read_bytes() for path in (tmp_path / "adapters").glob(f"*/{WEIGHTS}")}
    assert len(weights) == 2
    with monkeypatch.context() as patch:
        patch.setattr(training, "heal", lambda *_: pytest.fail("it was trained before"))
        assert healing_training(paper).rows == result.rows
    assert weights == {path: path.read_bytes() for path in (tmp_path / "adapters").glob(f"*/{WEIGHTS}")}

    quality = run_experiment("stage_quality", paper)
    assert quality.rows == stage_quality(paper).rows
    assert list(dict.fromkeys(row["variant"] for row in quality.rows)) == VARIANTS
    asked = [row for row in quality.rows if row["task"] != LOGITS]
    table = {variant: [r for r in asked if r["variant"] == variant] for variant in VARIANTS}
    items = [(r["task"], r["item"]) for r in table["s0"]]
    assert sorted({task for task, _ in items}) == ["closed_book", "extractive", "text"]
    assert (len(items), len(set(items))) == (8 + 4 + 3, 15)
    assert all([(r["task"], r["item"]) for r in rows] == items for rows in table.values())

    def scores(variant: str) -> list[dict]:
        return [{key: value for key, value in row.items() if key != "variant"} for row in table[variant]]

    assert scores("s3") == scores("s0")
    assert quality.summary.value("bit_identical", stage=3) is True
    assert quality.provenance["block"] == [2, 3, 4]
    for other in ("s0", "s1_none"):
        assert scores("s1_report") != scores(other)
    assert quality.summary.value("em_drop", stage=3) == 0
    for score in ("em_pct", "f1_pct", "answer_nll", "perplexity"):
        own = [entry["where"] for entry in quality.summary.all(score) if "task" not in entry["where"]]
        assert own == [PLACES[variant] for variant in VARIANTS]
    assert len(quality.summary.all("f1_pct", task="closed_book")) == len(VARIANTS)
    assert not quality.summary.all("choice_pct"), "SQuAD has no choices"
    for written in (result, quality):
        content = json.loads(written.path.read_text())
        del content["parameters"]  # recorded as the user typed them; nothing else may hold a path
        assert str(tmp_path) not in json.dumps(content)


def test_our_recipe_and_a_task_adapter_take_the_same_path(paper, tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "ours", dataclasses.replace(OURS, steps=1))
    monkeypatch.setitem(RECIPES, "task", dataclasses.replace(TASK, steps=2))
    profile = changed(
        paper,
        served={"task_adapter": "task"},
        training={"recipes": ["ours"]},
        quality={"recipes": ["ours"], "judged": "extractive", "closed_book": 0, "items": 4},
    )
    outcome = healing_training(profile)
    assert {row["adapter"] for row in outcome.rows} == {"task", "A-ours", "AB-ours"}
    task, stage = (read_recipe(tmp_path / "adapters" / name) for name in ("task", "A-ours"))
    assert task["layers"] == list(range(6)) and task["base_sha256"] != stage["base_sha256"]
    assert {"answer_loss", "text_loss"} <= set(task["curve"][0])
    assert {"answer_loss", "distill_loss"} <= set(stage["curve"][0])
    quality = stage_quality(profile)
    assert {row["task"] for row in quality.rows} == {"extractive", "text", LOGITS}
    assert stage_summary(quality.rows, profile.parameters()).value("bit_identical", stage=3) is True
    assert quality.provenance["task_adapter_sha256"]


def test_quality_without_its_adapters_says_which_is_missing(paper):
    with pytest.raises(
        StageError, match=r"A-report.*train it \(firsttoken measure healing_training\), or check it out"
    ):
        stage_quality(paper)


def test_layer_distance_has_every_start_of_every_size(paper):
    outcome = layer_distance(paper)
    config = paper.section("distance", DistanceConfig)
    rows = {(r["size_layers"], r["start_layer"], r["tokens"]): r for r in outcome.rows}
    assert set(rows) == {(n, s, t) for n in (1, 2, 3, 4) for s in range(7 - n) for t in ("last", "all")}
    best = min(range(5), key=lambda start: rows[2, start, "last"]["distance"])
    value = distance_summary(outcome.rows, paper.parameters()).value
    assert (value("chosen_start"), value("chosen_end")) == (best, best + 1)
    assert value("relative_depth") == best / 6 and value("dropped_layers_pct") == pytest.approx(100 / 3)
    assert 0 <= value("stability_pct") <= 100
    assert all(r["low"] <= r["distance"] <= r["high"] for r in outcome.rows)
    assert {len(r["by_passage"]) for r in outcome.rows} == {config.passages}
    assert untimed(layer_distance(paper).rows) == untimed(outcome.rows)


def test_the_block_that_is_deployed_may_be_larger_than_those_of_the_map(paper):
    profile = changed(paper, distance={"max_block": 1})
    rows = layer_distance(profile).rows
    assert {row["size_layers"] for row in rows} == {1, 2}
    assert distance_summary(rows, profile.parameters()).value("chosen_end") <= 5


@pytest.mark.parametrize("size", [6, 9])
def test_layer_distance_refuses_a_block_that_does_not_fit(paper, size, monkeypatch):
    monkeypatch.setattr(experiments, "load_model", lambda *_, **__: pytest.fail("the weights were loaded first"))
    with pytest.raises(
        ProfileError, match=rf"distance\.block .*: {size + 1} layers of tiny-llama .*, there are 6; low"
    ):
        layer_distance(changed(paper, distance={"block": size}))


def test_what_is_too_long_for_training_is_cut_and_counted(paper, tmp_path):
    whole, cut = (changed(paper, healing={"max_tokens": tokens}) for tokens in (1024, 48))
    assert healing_live(whole).provenance["cut_questions"] == 0
    assert healing_live(cut).provenance["cut_questions"] > 0
    provenance = healing_training(cut).provenance["cut_questions"]
    assert provenance.keys() == {"A-report", "AB-report"} and min(provenance.values()) > 0
    assert read_recipe(tmp_path / "adapters" / "A-report")["recipe"]["max_tokens"] == 48


def test_stages_are_judged_by_the_closed_book_as_in_the_paper(paper):
    healing_training(paper)
    outcome = stage_quality(paper)
    summary = stage_summary(outcome.rows, paper.parameters())
    for variant in ("s1_report", "s3"):
        scores = [row["f1"] for row in outcome.rows if (row["variant"], row["task"]) == (variant, "closed_book")]
        judged = summary.of("f1_pct", **PLACES[variant])
        assert judged["value"] == pytest.approx(100 * sum(scores) / len(scores))
        asked = summary.of("f1_pct", **PLACES[variant], task="closed_book")
        assert asked | {"where": PLACES[variant]} == judged
        assert summary.of("f1_pct", **PLACES[variant], task="extractive")["n"] == 8
    assert summary.of("em_drop", **PLACES["s1_report"])["n"] == 4
    assert outcome.provenance["judged"] == "closed_book"


def test_healing_live_takes_its_steps_and_writes_no_adapter(paper, tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "report", dataclasses.replace(REPORT, accumulate=2))
    outcome = healing_live(changed(paper, live={"steps": 3}))
    assert [row["step"] for row in outcome.rows] == [1, 2, 3]
    summary = live_summary(outcome.rows, {})
    first = summary.of("loss", case="first steps")
    assert first["n"] == 1
    assert first["value"] == pytest.approx(outcome.rows[0]["answer_loss"], abs=1e-3)
    assert summary.value("step_s") == pytest.approx(outcome.rows[-1]["train_s"] / 3, abs=0.01)
    assert not (tmp_path / "adapters").exists()
    torch.manual_seed(99)
    assert untimed(healing_live(changed(paper, live={"steps": 3})).rows) == untimed(outcome.rows)
