"""Prompts, samples and padding."""

from __future__ import annotations

import torch

from firsttoken.assets.corpora import QAItem
from firsttoken.progressiveserve.samples import Sample, padded, prompt_samples, qa_prompt, qa_sample, text_samples

ITEM = QAItem("i1", " A passage. ", " why? ", (" because ", "so"))


def test_prompts_are_open_after_answer():
    assert qa_prompt(ITEM.passage, ITEM.question) == "A passage.\nQuestion: why?\nAnswer:"
    assert qa_prompt("", "why?") == "Question: why?\nAnswer:"


def test_a_sample_is_the_prompt_then_the_first_answer_and_a_stop(tokenizer):
    sample = qa_sample(ITEM, tokenizer, max_tokens=100)
    assert sample.key == "i1"
    assert tokenizer.decode(sample.tokens) == "A passage.\nQuestion: why?\nAnswer: because\n"
    assert tokenizer.decode(sample.tokens[: sample.answer_start]) == qa_prompt(ITEM.passage, ITEM.question)
    assert tokenizer.eos_token_id not in sample.tokens


def test_a_long_prompt_loses_its_start_and_never_the_answer(tokenizer):
    sample = qa_sample(ITEM, tokenizer, max_tokens=20)
    assert len(sample.tokens) == 20
    assert tokenizer.decode(sample.tokens).endswith("?\nAnswer: because\n")
    assert tokenizer.decode(sample.tokens[sample.answer_start :]) == " because\n"
    shorter_than_the_answer = qa_sample(ITEM, tokenizer, max_tokens=4)
    assert tokenizer.decode(shorter_than_the_answer.tokens) == ": because\n"
    assert shorter_than_the_answer.answer_start == 1


def test_texts_and_open_prompts_have_no_answer(tokenizer):
    texts = text_samples(torch.tensor([[3, 4, 5], [6, 7, 8]]), "text-")
    assert texts == [Sample("text-0", (3, 4, 5), 3), Sample("text-1", (6, 7, 8), 3)]
    (prompt,) = prompt_samples([("A passage.", "why?")], tokenizer, 12, "prompt-")
    assert (prompt.key, len(prompt.tokens), prompt.answer_start) == ("prompt-0", 12, 12)
    assert tokenizer.decode(prompt.tokens).endswith("y?\nAnswer:")


def test_padding_is_on_the_right():
    rows = padded([Sample("a", (5,), 1), Sample("b", (6, 7, 8), 2)])
    assert rows.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert rows.dtype == torch.long
