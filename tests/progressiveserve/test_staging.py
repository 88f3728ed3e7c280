"""``firsttoken stage``: a folder, random weights, the served model; and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from firsttoken.__main__ import main
from firsttoken.progressiveserve.staging import stage_model
from firsttoken.study.errors import StageError


def test_a_folder_is_staged_and_stays_a_checkpoint_for_stock_transformers(paper, tmp_path, ids):
    manifest = stage_model(paper, tmp_path / "staged", "none")
    assert [stage.name for stage in manifest.stages] == ["A", "B", "C"]
    assert [part.layer for part in manifest.stages[1].parts] == [2, 3]
    assert all(stage.adapter is None for stage in manifest.stages)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-llama")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "staged")
    with torch.inference_mode():
        assert torch.equal(whole(ids).logits, again(ids).logits)


def test_random_weights_are_staged_without_adapters(paper, tmp_path):
    drawn = dataclasses.replace(paper, model="random:tiny-6")
    manifest = stage_model(drawn, tmp_path / "random")
    assert manifest.kind == "random" and manifest.stages[0].adapter is None
    assert stage_model(drawn, tmp_path / "random") == manifest


def test_adapters_that_are_not_there_are_named(paper, tmp_path):
    with pytest.raises(StageError, match="A-report"):
        stage_model(paper, tmp_path / "staged")
    with pytest.raises(StageError, match="no adapters of 'mine'; choose report, ours, task or none"):
        stage_model(paper, tmp_path / "staged", "mine")
    assert not (tmp_path / "staged").exists()


def test_the_command_line_says_what_each_stage_weighs(tmp_path, capsys):
    chosen = ["--set", "model=random:tiny-6", "--set", "served.block_start=2", "--set", "served.block_size=3"]
    assert main(["stage", str(tmp_path / "staged"), *chosen]) == 0
    out = capsys.readouterr().out
    assert "stage 1 (A): 5 files, 0." in out and "firsttoken serve" in out
    assert main(["stage", str(tmp_path / "other"), "--set", "model=random:huge"]) == 2
    assert "no shape is called 'huge'" in capsys.readouterr().err


def test_serving_what_is_no_model_folder_is_refused(tmp_path, capsys):
    assert main(["serve", str(tmp_path)]) == 2
    assert "has no config.json; a model folder holds" in capsys.readouterr().err
