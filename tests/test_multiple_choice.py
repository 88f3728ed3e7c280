"""All options of a question in one row give what one row an option gives, and the summary counts them right."""

from __future__ import annotations

import pytest
import torch
from byte_tokenizers import a_token_a_byte

from firsttoken.assets.models import load_model
from firsttoken.progressiveserve.passlayer import pass_layers
from firsttoken.study import paths, timing
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken_studies import multiple_choice
from firsttoken_studies.choice_tasks import LIKELIEST, ChoiceItem
from firsttoken_studies.multiple_choice import ChoiceTasksConfig, accuracy_summary, choices, option_losses

ITEMS = [
    ChoiceItem(("one context",) * 4, ("a", "an ending", "another longer ending", "b c"), 2),
    ChoiceItem(("Sarah was late so Sarah", "Sarah was late so Maria"), ("took the bus.",) * 2, 0),
    ChoiceItem(("x",) * 2, ("yes", "no"), 1),
]


def alone(model, tokenizer, context, continuation):
    known, whole = (tokenizer(text)["input_ids"] for text in (context, f"{context} {continuation}"))
    with torch.inference_mode():
        said = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return -sum(said[at - 1, whole[at]].item() for at in range(len(known), len(whole)))


@pytest.mark.parametrize("missing", [(), (0, 3)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_options_packed_into_a_row_have_the_losses_of_options_alone(batch, missing):
    """Also where layers are passed; within 1e-4 nats of some 30, in float32."""
    model, tokenizer = load_model("random:tiny-6", seed=3).model, a_token_a_byte()
    pass_layers(model, missing)
    packed = option_losses(model, tokenizer, ITEMS, batch)
    for item, losses in zip(ITEMS, packed, strict=True):
        pairs = zip(item.contexts, item.continuations, strict=True)
        assert losses == pytest.approx([alone(model, tokenizer, *pair) for pair in pairs], abs=1e-4)


def numbers(text: str) -> dict[str, list[int]]:
    """A tokenizer whose words are the numbers of tokens."""
    return {"input_ids": [int(word) for word in text.split()]}


def test_a_last_word_is_right_just_where_greedy_decoding_gives_it():
    """Texts of unlike length share a batch. The nats of a right word are the very number of the likeliest tokens'."""
    model, items = load_model("random:tiny-6", seed=3).model, []
    for context in ("5 9 3", "1 2 3 4 5 6 7 8 9 10 11", "7"):
        word: list[int] = []
        for _ in range(3):
            with torch.inference_mode():
                said = model(torch.tensor([numbers(context)["input_ids"] + word])).logits[0, -1]
            wrong = " ".join(map(str, [*word, int(said.argmin())]))
            word.append(int(said.argmax()))
            items += [ChoiceItem((context,) * 2, (text, LIKELIEST), 0) for text in (" ".join(map(str, word)), wrong)]
    losses = option_losses(model, numbers, items, 4)
    assert all(ours == likeliest for ours, likeliest in losses[::2])
    assert choices(model, numbers, items, 4, by_length=False) == [0, 1] * 9


def test_a_run_that_was_cut_off_goes_on_at_its_part(monkeypatch, tmp_path):
    """Nothing is asked twice of the same weights and variant; others are asked, and the time of both runs counts."""
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    monkeypatch.setattr(multiple_choice, "_PART", 2)
    monkeypatch.setattr(multiple_choice, "choice_items", lambda task, count: (ITEMS * 2)[:count])
    asked: list[int] = []

    def answer(model: object, tokenizer: object, items: list[ChoiceItem], *_: object) -> list[int]:
        asked.append(len(items))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [item.answer for item in items]

    monkeypatch.setattr(multiple_choice, "choices", answer)
    config = ChoiceTasksConfig(("sciq 5",), 2)
    with pytest.raises(KeyboardInterrupt):
        config.chosen("plain", None, None, weights="a")
    with timing.count_resumed() as resumed:
        rows = config.chosen("plain", None, None, weights="a")
    assert asked == [2, 2, 1, 1] and rows == [{"task": "sciq", "variant": "plain", "chosen": [2, 0, 1, 2, 0]}]
    assert sum(resumed) != 0
    assert config.chosen("plain", None, None, weights="a") == rows and len(asked) == 4
    for variant, weights in (("other", "a"), ("plain", "b"), ("plain", "")):
        config.chosen(variant, None, None, weights=weights)
    assert len(asked) == 13


def test_the_length_counts_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("firsttoken_studies.multiple_choice.option_losses", lambda *_: [[3.0, 4.0]])
    item = [ChoiceItem(("c",) * 2, ("a", "abcdefgh"), 1)]
    assert (choices(None, None, item, 1, by_length=False), choices(None, None, item, 1, by_length=True)) == ([0], [1])


def test_the_mean_over_tasks_counts_each_task_alike():
    rows = [
        {"task": "big", "right": [0] * 30},
        {"task": "small", "right": [1] * 10},
        {"task": "big", "variant": "before", "chosen": [0] * 30},
        {"task": "small", "variant": "before", "chosen": [1] * 10},
        {"task": "big", "variant": "after", "chosen": [0] * 24 + [1] * 6},  # 20 points lost
        {"task": "small", "variant": "after", "chosen": [1] * 10},
    ]
    summary = accuracy_summary(rows, {"before": {"variant": "before"}, "after": {"variant": "after"}}, "before")
    assert summary.value("accuracy_pct", variant="after", task="big") == pytest.approx(80)
    assert summary.value("accuracy_change", variant="after", task="big") == pytest.approx(-20)
    mean = summary.of("accuracy_change", variant="after", across="mean")
    assert mean["value"] == pytest.approx(-10)
    assert (mean["n"], mean["low"] < -10 < mean["high"] < 0) == (40, True)


@pytest.mark.parametrize(
    ("tasks", "error", "says"),
    [
        (("hellaswag",), ProfileError, "no task with a number"),
        (("hellaswag 0",), ProfileError, "no task with a number"),
        (("hellaswag 5", "hellaswag 6"), ProfileError, "there twice"),
        (("helaswag 5",), CorpusError, "did you mean"),
        (("winogrande 1268",), CorpusError, "has 1,267 questions"),
    ],
)
def test_tasks_that_cannot_be_asked_are_refused(tasks, error, says):
    with pytest.raises(error, match=says) as refused:
        ChoiceTasksConfig(tasks, 4)
    assert "\n" not in str(refused.value)
