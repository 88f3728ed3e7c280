"""Training runs: their materials, that they can be repeated, and that a finished one is not."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from firsttoken.assets.adapter_files import WEIGHTS, read_recipe
from firsttoken.assets.corpora import SPLITS, QAItem, boolq_prompts, load_qa, running_text, sciq
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.progressiveserve import training
from firsttoken.progressiveserve.healing import Teacher
from firsttoken.progressiveserve.recipe import OURS, REPORT, TASK
from firsttoken.progressiveserve.training import HealingConfig, heal, healed, training_data
from firsttoken.study.errors import FirstTokenError

QUICK = dataclasses.replace(OURS, name="quick", steps=2, dropout=0.1, warmup_steps=0)


@pytest.fixture
def config(questions_file, own_text) -> HealingConfig:
    """Tiny materials from files."""
    return HealingConfig(
        questions=str(questions_file),
        windows=4,
        window_tokens=48,
        prompts=3,
        watch_every=0,
        watch_questions=2,
        watch_windows=1,
    )


def adapter_of(peft) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in peft.named_parameters() if "lora_" in name}


def test_materials_of_the_report_are_questions_only(config, tokenizer):
    data = training_data(config, REPORT, tokenizer)
    assert data.text == []
    assert len(data.questions) == len(load_qa(config.questions, "train")) > 20
    assert len(data.validation) == 2 and data.windows.shape == (1, 256)


def test_text_joins_as_windows_and_where_it_is_distilled_as_open_prompts(config, tokenizer):
    ours, task = training_data(config, OURS, tokenizer).text, training_data(config, TASK, tokenizer).text
    assert [s.key for s in task] == [f"text-{i}" for i in range(4)]
    assert [s.key for s in ours] == [f"text-{i}" for i in range(4)] + [f"prompt-{i}" for i in range(3)]
    assert {len(s.tokens) for s in task} == {48}
    assert all(tokenizer.decode(s.tokens).endswith("Answer:") for s in ours[4:])


def test_a_configuration_has_its_own_steps_and_leaves_out_what_must_be_cut(config, tokenizer):
    longer = dataclasses.replace(config, max_tokens=70, steps=7, distill_share=0.1)
    sized = longer.sized(OURS)
    assert (sized.steps, sized.max_tokens, sized.distill_share) == (7, 70, 0.1)
    assert longer.sized(REPORT).total_steps(640) == REPORT.total_steps(640), "it counts epochs"
    cut = training_data(longer, longer.sized(OURS), tokenizer)
    fitting = training_data(dataclasses.replace(longer, only_whole=True), longer.sized(OURS), tokenizer)
    assert 0 < cut.cut_questions < len(cut.questions)
    assert fitting.questions == [sample for sample in cut.questions if not sample.cut]


def test_the_hash_follows_the_training_part_alone(config, tokenizer):
    base = training_data(config, OURS, tokenizer).sha256
    assert training_data(dataclasses.replace(config, watch_questions=1), OURS, tokenizer).sha256 == base
    for change in ({"windows": 3}, {"prompts": 2}, {"window_tokens": 32}):
        assert training_data(dataclasses.replace(config, **change), OURS, tokenizer).sha256 != base
    assert training_data(config, dataclasses.replace(OURS, max_tokens=30), tokenizer).sha256 != base


def test_healing_trains_a_copy_and_the_served_model_stays_whole(served, config, tokenizer, ids):
    before, stood = served.model(ids).logits, list(layers_of(served.model))
    data = training_data(config, QUICK, tokenizer)
    peft, curve = heal(served, served.plan.missing(1), QUICK, data, config, Teacher(served.model))
    assert list(layers_of(served.model)) == stood
    assert torch.equal(served.model(ids).logits, before)
    assert {int(name.split("layers.")[1].split(".")[0]) for name in adapter_of(peft)} == {0, 1, 5}
    assert set(curve.rows[-1]) == {
        "step",
        "answer_loss",
        "distill_loss",
        "validation_em",
        "validation_f1",
        "validation_answer_nll",
        "validation_perplexity",
    }


def test_healing_follows_the_seed_of_its_recipe(served, config, tokenizer):
    data = training_data(config, QUICK, tokenizer)

    def run(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(100 + len(runs))  # what ran before must not matter: a resumed training skips some runs
        recipe = dataclasses.replace(QUICK, seed=seed)
        return adapter_of(heal(served, served.plan.missing(1), recipe, data, config, Teacher(served.model))[0])

    runs: list[dict[str, torch.Tensor]] = []
    for seed in (0, 0, 1):
        runs.append(run(seed))
    one, again, other = runs
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_a_finished_run_is_read_and_any_change_runs_again(served, config, tmp_path, monkeypatch):
    folder, recipe = tmp_path / "A-quick", dataclasses.replace(QUICK, steps=1)
    first = healed(folder, served, (2, 3, 4), recipe, config)
    assert first["layers"] == [0, 1, 5] and first["steps"] == 1 and first["depth"] == 6
    assert first["base_sha256"] == served.sha256 and first["seed"] == 0
    assert first["machine"].keys() == {"slug", "cpu", "gpu", "packages"}
    assert read_recipe(folder) == first
    runs = []
    real = training.heal
    monkeypatch.setattr(training, "heal", lambda *args, **named: runs.append(args) or real(*args, **named))
    assert healed(folder, served, (2, 3, 4), recipe, config) == first
    assert runs == []
    others = [
        (served, (4,), recipe, config),
        (dataclasses.replace(served, sha256="0dd"), (2, 3, 4), recipe, config),
        (served, (2, 3, 4), dataclasses.replace(recipe, rank=2), config),
        (served, (2, 3, 4), dataclasses.replace(recipe, seed=1), config),
        (served, (2, 3, 4), recipe, dataclasses.replace(config, windows=3)),
    ]
    for count, (model, missing, wanted, setting) in enumerate(others, start=1):
        healed(folder, model, missing, wanted, setting)
        assert len(runs) == count
        weights = (folder / WEIGHTS).read_bytes()
        healed(folder, model, missing, wanted, setting)
        assert len(runs) == count and (folder / WEIGHTS).read_bytes() == weights


def test_an_interrupted_run_leaves_nothing_and_starts_again(served, config, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    folder = tmp_path / "adapters" / "A-quick"
    with monkeypatch.context() as patch:
        patch.setattr(training, "heal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            healed(folder, served, (4,), QUICK, config)
    assert not folder.exists()
    assert healed(folder, served, (4,), QUICK, config)["steps"] == 2


def test_no_validation_questions_are_one_clear_line(served, config, tokenizer):
    data = dataclasses.replace(training_data(config, QUICK, tokenizer), validation=[])
    with pytest.raises(FirstTokenError) as caught:
        heal(served, (4,), dataclasses.replace(QUICK, steps=1), data, config, Teacher(served.model))
    assert "\n" not in str(caught.value)


def letters(text: str) -> str:
    """The text by its letters and digits: another quotation mark does not make it another text."""
    return re.sub(r"\W", "", text.casefold())


@pytest.mark.assets
@pytest.mark.parametrize("read", [sciq, lambda split: load_qa("triviaqa", split)], ids=["sciq", "triviaqa"])
def test_no_question_is_both_learned_and_asked(read):
    parts: dict[str, list[QAItem]] = {split: read(split) for split in SPLITS}
    for field in ("id", "question", "passage"):
        texts = {split: {letters(getattr(i, field)) for i in items} - {""} for split, items in parts.items()}
        assert not any(texts[a] & texts[b] for a, b in (SPLITS[:2], SPLITS[1:], SPLITS[::2])), field


@pytest.mark.assets
@pytest.mark.parametrize(
    "read", [running_text, lambda split: [passage for passage, _ in boolq_prompts(split)]], ids=["text", "prompts"]
)
def test_no_passage_is_both_learned_and_measured(read):
    parts = {split: {letters(text) for text in read(split)} for split in SPLITS}
    shared = {f"{a} and {b}": len(parts[a] & parts[b]) for a, b in (SPLITS[:2], SPLITS[1:], SPLITS[::2])}
    assert shared == dict.fromkeys(shared, 0)
