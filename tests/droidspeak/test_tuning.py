"""Tuning the models of a pair: the loss, the same run twice, and what is read back from the folder."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

from firsttoken.assets.adapter_files import WEIGHTS, read_recipe
from firsttoken.study.errors import CorpusError
from firsttoken_studies.droidspeak.reuse_items import Encoded, TaskItem
from firsttoken_studies.nb30_full_reuse_and_sensitivity import training
from firsttoken_studies.nb30_full_reuse_and_sensitivity.training import TuningConfig, answer_loss, tune, tuned

CONFIG = TuningConfig(rank=2, learning_rate=1e-2, steps=14, batch=2, tokens=12, items=0)
BASE = "5e12" * 16


def encoded(count: int, seed: int) -> list[Encoded]:
    """Prefixes of several lengths, and the same answer to all of them."""
    draw = torch.Generator().manual_seed(seed)
    item = TaskItem("0", "qa", "", "", ("",))
    return [
        Encoded(item, torch.randint(1, 256, (6 + i % 5,), generator=draw).tolist(), [7, 8], [20 + seed, 3][: 1 + i % 2])
        for i in range(count)
    ]


@pytest.fixture
def model(tiny):
    return copy.deepcopy(tiny(1, 2))


TASKS = {"one": encoded(6, 1), "two": encoded(5, 2)}


def test_the_loss_is_that_of_the_target_s_tokens_alone(tiny):
    model, items = tiny(1, 2), encoded(4, 1)
    losses = []
    for item in items:
        ids = torch.tensor([[*item.prefix, *item.suffix, *item.target]])
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            logits = model(ids).logits[0].float()
        start = len(item.prefix) + len(item.suffix)
        losses += F.cross_entropy(logits[start - 1 : -1], ids[0, start:], reduction="none").tolist()
    with torch.inference_mode():
        assert answer_loss(model, items).item() == pytest.approx(sum(losses) / len(losses), rel=0.02)


def test_training_learns_and_leaves_the_base_alone(model, tmp_path):
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    recipe = tuned(tmp_path / "a", model, BASE, TASKS, CONFIG)
    losses = [row["answer_loss"] for row in recipe["curve"]]
    assert [row["step"] for row in recipe["curve"]] == list(range(1, 15)) and losses[-1] < 0.8 * losses[0]
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())


def test_the_same_run_is_made_once_and_another_again(model, tmp_path, monkeypatch):
    config, folder, runs = replace(CONFIG, steps=2), tmp_path / "adapter", []
    monkeypatch.setattr(training, "tune", lambda *args: runs.append(args) or tune(*args))
    first = tuned(folder, model, BASE, TASKS, config)
    weights = (folder / WEIGHTS).read_bytes()
    again = tuned(folder, model, BASE, TASKS, config)
    assert (len(runs), again["curve"], again["train_s"]) == (1, first["curve"], first["train_s"])
    assert read_recipe(folder) == again
    changes = [
        {"seed": 1},
        {"config": replace(config, learning_rate=2e-2)},
        {"base_sha256": "another"},
        {"tasks": {"one": TASKS["one"]}},
        {"tasks": {"one": TASKS["one"][:-1], "two": TASKS["two"]}},
        {"tasks": {"two": TASKS["two"], "one": TASKS["one"]}},
    ]
    for number, change in enumerate(changes, 2):
        call = {"base_sha256": BASE, "tasks": TASKS, "config": config, "seed": 0} | change
        tuned(folder, model, **call)
        assert len(runs) == number, change
        tuned(folder, model, **call)
        assert len(runs) == number, change
    tuned(folder, model, BASE, TASKS, config)
    assert (folder / WEIGHTS).read_bytes() == weights, "a run can be repeated bit by bit"


def test_what_is_exported_is_what_was_trained(tiny, model, tmp_path):
    recipe = tuned(tmp_path / "a", model, BASE, TASKS, CONFIG)
    items = [*TASKS["one"], *TASKS["two"]]
    peft, curve = tune(copy.deepcopy(tiny(1, 2)), list(TASKS.values()), CONFIG)
    assert curve == recipe["curve"]
    loaded = PeftModel.from_pretrained(copy.deepcopy(tiny(1, 2)), str(tmp_path / "a"))
    with torch.inference_mode():
        kept, trained, base = (
            answer_loss(one, items).item() for one in (loaded.get_base_model(), peft.get_base_model(), tiny(1, 2))
        )
    assert kept == pytest.approx(trained, rel=0.02)  # 16 bits on disk
    assert trained < 0.8 * base


@pytest.mark.parametrize("tasks", [{}, {"one": TASKS["one"], "two": []}])
def test_a_task_without_items_is_refused_before_anything_is_changed(model, tmp_path, tasks):
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(CorpusError, match=r"a task has no training items; lower the profile's reuse_training.items"):
        tuned(tmp_path / "a", model, BASE, tasks, CONFIG)
    assert [name for name, _ in model.named_modules()] == names and not (tmp_path / "a").exists()


def test_every_item_comes_before_any_comes_again():
    draws = training._draws([TASKS["one"], TASKS["two"]], seed=3)
    drawn = [next(draws) for _ in range(60)]
    for task, of in zip(TASKS.values(), (drawn[::2], drawn[1::2]), strict=True):
        for at in range(0, 30 - len(task), len(task)):
            assert sorted(item.prefix for item in of[at : at + len(task)]) == sorted(item.prefix for item in task)
    assert drawn[:12:2] != drawn[12:24:2], "each time in a new order"
