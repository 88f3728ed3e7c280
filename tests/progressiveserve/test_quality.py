"""Quality scores against a slow, plain way to the same numbers, and answers from a model that says what it is told."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from firsttoken.assets.corpora import QAItem
from firsttoken.progressiveserve.passlayer import pass_layers
from firsttoken.progressiveserve.quality import (
    AnswerConfig,
    PrunedCache,
    _decode,
    answer_scores,
    perplexity,
    text_scores,
)
from firsttoken.progressiveserve.samples import qa_prompt
from firsttoken.scoring import exact_match, token_f1

NATS = {"rel": 1e-5, "abs": 2e-5}  # fp32, padded and not

ITEMS = [
    QAItem("wide", "The river is wide. " * 3, "How is it?", ("wide", "very wide"), ("wide", "in", "theatre", "no"), 0),
    QAItem("closed", "", "Who?", ("nobody",)),
    QAItem("two", "Tea.", "What is it that we drink here?", ("tea",), ("coffee and cream", "tea"), 1),
    QAItem("long", "In the thick of the thin thing. " * 8, "What?", ("thing",), ("a", "thing", "c", "d"), 1),
    QAItem("same", "", "Who?", ("nobody",)),
]


def slowly(model, tokenizer, item: QAItem, max_prompt_tokens: int = 384) -> dict:
    """The row of one item: ``generate`` without a cache or a batch, and one whole forward pass an option."""
    prompt = tokenizer.encode(qa_prompt(item.passage, item.question), add_special_tokens=False)[-max_prompt_tokens:]
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, use_cache=False, pad_token_id=0
    )
    text = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True).strip().split("\n")[0]
    losses = []
    for option in item.choices or item.answers[:1]:
        answer = tokenizer.encode(f" {option}\n", add_special_tokens=False)
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(answer)).item())
    row = {"item": item.id, "prediction": text, "em": exact_match(text, item.answers)}
    row |= {"f1": token_f1(text, item.answers), "answer_nll": losses[item.answer_index if item.choices else 0]}
    return row | ({"choice_correct": float(losses.index(min(losses)) == item.answer_index)} if item.choices else {})


def assert_rows(rows: list[dict], expected: list[dict]) -> None:
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for mine, theirs in zip(rows, expected, strict=True):
        assert mine["answer_nll"] == pytest.approx(theirs["answer_nll"], **NATS)
        assert mine | {"answer_nll": 0} == theirs | {"answer_nll": 0}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("missing", [(), (1, 2), (0,), (0, 1, 3)], ids=str)
def test_rows_are_those_of_the_slow_way_in_any_batch(make_model, tokenizer, kind, missing):
    model = make_model(kind)
    pass_layers(model, missing)
    with torch.inference_mode():
        expected = [slowly(model, tokenizer, item) for item in ITEMS]
    assert all(row["prediction"] for row in expected) and len({row["prediction"] for row in expected}) > 2
    for batch in (1, 2, 16):
        assert_rows(answer_scores(model, tokenizer, ITEMS, AnswerConfig(batch=batch)), expected)
    assert answer_scores(model, tokenizer, [], AnswerConfig()) == []


def test_a_long_prompt_loses_its_start(make_model, tokenizer):
    model = make_model()
    rows = answer_scores(model, tokenizer, ITEMS, AnswerConfig(max_prompt_tokens=30))
    lost = [len(tokenizer.encode(qa_prompt(item.passage, item.question))) - 30 for item in ITEMS]
    assert [row.pop("cut_tokens", 0) for row in rows] == [max(0, count) for count in lost] and max(lost) > 0
    assert_rows(rows, [slowly(model, tokenizer, item, 30) for item in ITEMS])


@pytest.fixture
def parrot(tokenizer):
    """Makes a model that says a text and a line end after "Answer:"; each character once, whatever the question was."""

    def make(text: str) -> LlamaForCausalLM:
        size = len(tokenizer) + 4  # heads of even width
        sizes = {"hidden_size": size, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=size, eos_token_id=0, tie_word_embeddings=False, **sizes))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        tokens = tokenizer.encode(f":{text}", add_special_tokens=False)
        assert len(set(tokens)) == len(tokens)
        model.lm_head.weight.zero_()
        for token, follower in zip(tokens, [*tokens[1:], *tokenizer.encode("\n")], strict=True):
            model.lm_head.weight[follower, token] = 1
        return model.eval()

    return make


@pytest.mark.parametrize(
    ("said", "prediction"),
    [
        (" Paris\nend", "Paris"),
        ("\nParis", "Paris"),
        (" Paris,xyzuv", "Paris,xyz"),
        (" Pa\n", "Pa"),
        ("Pari \nend", "Pari"),
        ("Paris<end>xyz", "Paris"),
    ],
    ids=["one line", "leading line end", "ten tokens", "nothing after it", "space before the end", "end of text"],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_an_answer_is_what_stands_before_the_end_of_its_line(tokenizer, parrot, said, prediction, batch):
    items = [QAItem("a", "", "where?", ("paris", "pa", "pari")), QAItem("b", "Some.", "who?", ("bob",))]
    rows = answer_scores(parrot(said), tokenizer, items, AnswerConfig(batch=batch))
    assert [row["prediction"] for row in rows] == [prediction, prediction]
    assert [row["em"] for row in rows] == [float(prediction != "Paris,xyz"), 0.0]


def test_an_answer_does_not_depend_on_how_long_its_neighbour_talks(tokenizer, parrot):
    model = parrot("Pari \nxyzuvw")
    starts = [tokenizer.encode(letter)[0] for letter in ("P", "z")]  # the second never ends within ten tokens
    model.lm_head.weight[tokenizer.encode("k")[0], tokenizer.encode("w")[0]] = 2
    model.lm_head.weight[tokenizer.encode("k")[0], tokenizer.encode("k")[0]] = 2

    def said(*tokens: int) -> list[str]:
        first = F.one_hot(torch.tensor(tokens), model.config.vocab_size).float()
        return _decode(model, tokenizer, first, PrunedCache(), torch.ones(len(tokens), 0, dtype=torch.long), 10)

    with torch.inference_mode():
        assert said(*starts) == said(starts[0]) + said(starts[1]) == ["Pari", "zuvwkkkkkk"]


def test_the_number_of_new_tokens_is_a_limit(tokenizer, parrot):
    item = QAItem("a", "", "where?", ("bcd",))
    for limit in (1, 3):
        (row,) = answer_scores(parrot("bcdfg"), tokenizer, [item], AnswerConfig(max_new_tokens=limit))
        assert row["prediction"] == "bcdfg"[:limit]


def test_text_losses_are_the_cross_entropy_in_any_batch(make_model):
    model = make_model()
    windows = torch.randint(1, 256, (5, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(windows).logits[:, :-1].log_softmax(-1)
    expected = -logits.gather(2, windows[:, 1:, None])[..., 0].mean(1)
    for batch in (1, 2, 8):
        rows = text_scores(model, windows, batch)
        assert [row["item"] for row in rows] == [f"window-{i}" for i in range(5)]
        assert [row["text_nll"] for row in rows] == pytest.approx(expected.tolist(), **NATS)


def test_perplexity_is_exp_of_the_mean_loss():
    assert perplexity([{"text_nll": math.log(2)}, {"text_nll": math.log(8)}]) == pytest.approx(4)
    assert perplexity(iter([{"text_nll": 0.0}])) == 1.0
