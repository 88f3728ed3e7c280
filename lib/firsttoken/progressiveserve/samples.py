"""Token sequences for healing and for measuring: one prompt form, used by both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from firsttoken.assets.corpora import QAItem

STOP = "\n"  # an answer is one line: the same stop in training and in decoding


@dataclass(frozen=True)
class Sample:
    """One training sequence; ``answer_start`` is the index of its first answer token (its length: no answer).

    ``cut`` counts the tokens that its prompt has lost to the longest length.
    """

    key: str
    tokens: tuple[int, ...]
    answer_start: int
    cut: int = 0


def qa_prompt(passage: str, question: str) -> str:
    """The zero-shot prompt: passage, question, and an open answer; without a passage it is closed-book."""
    return (f"{passage.strip()}\n" if passage else "") + f"Question: {question.strip()}\nAnswer:"


def shortened(ids: list[int], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[int]:
    """The tokens ``ids`` of a whole prompt as its model takes them: of more than ``limit`` it loses what follows the
    beginning-of-text token, where it has one, and never its end."""
    if len(ids) <= limit:
        return ids
    head = tokenizer.encode("")
    return head + ids[len(ids) - max(1, limit - len(head)) :]


def answer_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> list[int]:
    """``answer`` and the stop as they continue ``prompt``: encoded alone, SentencePiece would put a space before it."""
    return tokenizer.encode(f"{prompt} {answer.strip()}{STOP}")[len(tokenizer.encode(prompt)) :]


def qa_sample(item: QAItem, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Sample:
    """Prompt and first answer of ``item``; a longer prompt loses tokens at its start, never its answer."""
    text = qa_prompt(item.passage, item.question)
    answer = answer_tokens(tokenizer, text, item.answers[0])
    encoded = tokenizer.encode(text)
    prompt = shortened(encoded, tokenizer, max_tokens - len(answer))
    return Sample(item.id, (*prompt, *answer), len(prompt), len(encoded) - len(prompt))


def text_samples(windows: Tensor, prefix: str) -> list[Sample]:
    """Samples without an answer from ``windows`` [count, length] of running text."""
    return [Sample(f"{prefix}{i}", tuple(row), len(row)) for i, row in enumerate(windows.tolist())]


def prompt_samples(
    prompts: Iterable[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, max_tokens: int, prefix: str
) -> list[Sample]:
    """Samples without an answer from (passage, question) pairs, open after ``Answer:``."""
    encoded = (shortened(tokenizer.encode(qa_prompt(p, q)), tokenizer, max_tokens) for p, q in prompts)
    return [Sample(f"{prefix}{i}", tuple(ids), len(ids)) for i, ids in enumerate(encoded)]


def padded(samples: Sequence[Sample]) -> Tensor:
    """Token ids [samples, longest], padded on the right with 0, which a causal model never looks at from the left."""
    width = max(len(s.tokens) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.tokens)] = torch.tensor(sample.tokens)
    return ids
