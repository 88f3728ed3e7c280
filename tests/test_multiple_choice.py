"""All options of a question in one row give what one row an option gives, and the summary counts them right."""

from __future__ import annotations

import pytest
import torch
from byte_tokenizers import a_token_a_byte
from torch import nn

from firsttoken.assets.models import load_model
from firsttoken.engine.linear8 import Linear8
from firsttoken.progressiveserve.passlayer import pass_layers
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken_studies.choice_tasks import ChoiceItem
from firsttoken_studies.multiple_choice import ChoiceTasksConfig, accuracy_summary, choices, option_losses
from firsttoken_studies.nb51_eight_bits.eight_bits_tasks import DequantizedLinear8

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


def test_the_length_counts_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("firsttoken_studies.multiple_choice.option_losses", lambda *_: [[3.0, 4.0]])
    item = [ChoiceItem(("c",) * 2, ("a", "abcdefgh"), 1)]
    assert (choices(None, None, item, 1, by_length=False), choices(None, None, item, 1, by_length=True)) == ([0], [1])


def test_the_product_of_stored_values_is_llm_int8s():
    """Within 1e-5 of the product's own size: the codes are the same, only the sums are float32's."""
    draw = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 64)
    linear.weight.data, linear.bias.data = torch.randn(64, 96, generator=draw), torch.randn(64, generator=draw)
    x = torch.randn(5, 7, 96, generator=draw)
    x[2, 3, 10] = 40.0  # an outlier, which would set the step of its token
    small = Linear8.of(linear)
    with torch.no_grad():
        mixed, plain, exact = small(x), DequantizedLinear8(small)(x), linear(x)
    assert (mixed - plain).abs().max() < 1e-5 * exact.abs().max()
    assert (mixed - exact).abs().max() > 100 * (mixed - plain).abs().max()  # and both are rounded


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
