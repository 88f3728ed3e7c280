"""What every experiment starts from: runs as text, pairs, held-out items; and the adapters' training."""

from __future__ import annotations

import dataclasses

import pytest

from firsttoken.assets.adapter_files import read_recipe
from firsttoken.study.errors import CacheError, CorpusError, ModelError, ProfileError
from firsttoken_studies.droidspeak import setting as setting_module
from firsttoken_studies.droidspeak.reuse_items import Encoded, TaskItem
from firsttoken_studies.droidspeak.setting import Run, Setting, batches
from firsttoken_studies.nb30_full_reuse_and_sensitivity import training
from firsttoken_studies.nb30_full_reuse_and_sensitivity.training import reuse_training, training_summary


def test_runs_are_read(study):
    run = Run.parse("all <- org/base-1.5: /some where/hotpotqa.jsonl, 16384 tokens")
    assert (run.task, run.tokens, run.pair.sender) == ("/some where/hotpotqa.jsonl", 16384, "org/base-1.5")
    assert (run.name, run.key) == ("all <- org/base-1.5: hotpotqa", "all_from_org_base_1_5_hotpotqa")
    two = Setting(study.profile()).runs[1]
    assert two.row() == {
        "run": "tuned <- other: hotpotqa",
        "receiver": "tuned",
        "sender": "other",
        "task": "hotpotqa",
    }
    assert Run.parse("random:tiny-4 <- base: qa, 8 tokens").pair.receiver == "random:tiny-4"
    assert (run.step, Run.parse("a <- b: qa, 8 tokens, groups of 15").step) == (2, 15)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a <- b",
        "a <- b: qa",
        "a <- b: qa 320 tokens",
        "a <- b: qa, tokens",
        "a <- b: qa, -3 tokens",
        "a <- b: , 3 tokens",
        "a <- b: qa, 3 tokens, groups of 0",
        "a <- b: qa, 3 tokens, groups of two",
        "a <- b qa, 3 tokens",
        "a b: qa, 3 tokens",
    ],
)
def test_what_is_no_run_is_refused_before_a_model_is_loaded(study, text):
    with pytest.raises(ProfileError, match="write it as 'receiver <- sender") as caught:
        Setting(study.profile(**{"reuse.runs": [text], "model": "/nowhere"}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("reuse.bogus", 1, "unknown key 'bogus'"),
        ("reuse.items", "many", "items: expected int"),
    ],
)
def test_a_bad_profile_is_refused(study, key, value, message):
    with pytest.raises(ProfileError, match=message):
        Setting(study.profile(**{key: value}))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("qwen2", CacheError, "another architecture"),
        ("stranger", CacheError, "another tokenizer"),
        ("random:tiny-4", ModelError, "random:tiny-4 <- random:tiny-4 has no tokenizer"),
        ("absent", ModelError, "'absent' is no adapter in .*train it"),
    ],
)
def test_models_that_are_no_pair_are_refused(study, folders, name, error, message):
    name = str(folders / name) if (folders / name).is_dir() else name
    receiver = name if name.startswith("random") else "base"
    with pytest.raises(error, match=message) as caught:
        setting = Setting(study.profile(**{"reuse.runs": [f"{receiver} <- {name}: {study.task}, 96 tokens"]}))
        setting.pair(setting.runs[0])
    assert "\n" not in str(caught.value)


def test_items_are_held_out_and_in_one_set_only(study):
    setting = Setting(study.profile())
    run = setting.runs[0]
    tokenizer = setting.pair(run)[0].tokenizer
    chosen, judged = setting.items(run, tokenizer)
    assert (len(chosen), len(judged)) == (6, 6)
    ids = [item.item.id for item in [*chosen, *judged]]
    assert len(set(ids)) == 12
    assert max(len(item.prefix) for item in [*chosen, *judged]) <= 96
    assert [item.item.id for item in setting.items(run, tokenizer)[0]] == ids[:6]
    recipe = read_recipe(study.folder / "adapters" / "tuned")
    assert recipe["tuning"]["items"] == 0 and recipe["tasks"] == ["hotpotqa"]


def test_too_few_items_are_refused(study):
    with pytest.raises(ProfileError, match=r"eval_items: 1,006 held-out items of tuned <- base: hot.* are \d\d; lower"):
        Setting(study.profile(**{"reuse.eval_items": 1000}))


def test_too_few_items_of_a_constructed_task_are_refused_once_they_are_counted(study, monkeypatch):
    setting = Setting(study.profile())
    run, tokenizer = setting.runs[0], setting.pair(setting.runs[0])[0].tokenizer
    monkeypatch.setattr(setting, "config", dataclasses.replace(setting.config, eval_items=1000))
    with pytest.raises(CorpusError, match=r"tuned <- base: hotpotqa has \d\d held-out items .*, not 1006; lower"):
        setting.items(run, tokenizer)


def test_a_pair_that_the_device_cannot_hold_is_refused_before_it_is_loaded(study, monkeypatch):
    monkeypatch.setattr(setting_module, "device_memory", lambda device: 100_000)
    with pytest.raises(ProfileError, match=r"reuse\.runs: [\d,]+ bytes of memory of the device .*name smaller models"):
        Setting(study.profile())


def test_batches_keep_every_item_and_put_like_lengths_together():
    items = [Encoded(TaskItem(str(i), "qa", "", "", ()), [1] * (i * 7 % 10 + 1), [1], [1]) for i in range(10)]
    parts = list(batches(items, 4))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert [len(item.prefix) for part in parts for item in part] == list(range(1, 11))
    assert list(batches(items[::-1], 4)) == parts


@pytest.mark.parametrize(("layers", "edges"), [(2, [0, 2, 4, 5]), (1, [0, 1, 2, 3, 4, 5]), (5, [0, 5]), (9, [0, 5])])
def test_edges_end_at_the_last_layer(layers, edges):
    assert Run.parse(f"a <- b: qa, 3 tokens, groups of {layers}").edges(5) == edges


def test_adapters_are_trained_and_kept(study, monkeypatch):
    outcome = study.trained
    assert {row["adapter"] for row in outcome.rows} == {"tuned", "half-hotpotqa"}
    losses = [row["answer_loss"] for row in outcome.rows if row["adapter"] == "tuned"]
    assert len(losses) == 60 and losses[-1] < 0.5 * losses[0]
    trained = training_summary(outcome.rows, {}).all("train_s")
    assert [entry["where"] for entry in trained] == [{"model": "tuned"}, {"model": "half-hotpotqa"}]
    assert outcome.provenance["base"]["kind"] == "real"
    monkeypatch.setattr(training, "tune", lambda *_: pytest.fail("it was trained before"))
    assert reuse_training(study.profile()).rows == outcome.rows


@pytest.mark.parametrize("line", ["tuned", "tuned: qa", "tuned: qa: many", "tuned: qa: 0", ": qa: 3", "tuned:: 3"])
def test_a_bad_adapter_line_is_refused(study, line):
    with pytest.raises(ProfileError, match=r"write it as 'name: task . task: steps'"):
        reuse_training(study.profile(**{"reuse_training.adapters": [line]}))


def test_adapters_can_be_given_away_without_a_path_of_this_machine(study):
    found = [path for path in (study.folder / "adapters").glob("*/*.json")]
    assert len(found) == 4
    assert [path.name for path in found if str(study.folder.parent) in path.read_text()] == []
