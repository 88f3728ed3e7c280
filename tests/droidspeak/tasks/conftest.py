"""Tokenizers of the three kinds that are about, and made-up passages where SciQ's and BoolQ's would be read."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
from byte_tokenizers import byte_fallback, byte_level
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from firsttoken.assets.qa_files import QAItem
from firsttoken_studies.droidspeak import constructed_tasks

WORDS = ["abe", "bodu", "cin", "dezo", "eno", "fub", "gaz", "hino", "jeza", "kod", "luna", "medi", "nuz", "quno", "wob"]


def _merges(space: str) -> list[tuple[str, str]]:
    """What makes most of ``WORDS`` one token or two, with the space before them."""
    starts = (pairwise(accumulate(space + word)) for word in WORDS)
    return list(dict.fromkeys((short, long[-1]) for word in starts for short, long in word))


def _fast(backend: Tokenizer, headed: bool) -> PreTrainedTokenizerFast:
    if headed:
        backend.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<start>", eos_token="<end>", clean_up_tokenization_spaces=False
    )


ENDS, LINES = ["<start>", "<end>"], [("Ċ", "Ċ"), (".", "ĊĊ"), (".", "Ċ")]
LETTERS = sorted({letter for word in WORDS for letter in word})
TOKENIZERS = {
    "plain": _fast(byte_level(ENDS, _merges("Ġ"), use_regex=False), headed=False),
    "joins line ends": _fast(byte_level(ENDS, LINES + _merges("Ġ"), use_regex=False), headed=True),
    "sentencepiece": _fast(byte_fallback(LETTERS, ENDS, _merges("▁")), headed=True),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """As SmolLM's (no head, line ends apart), as Llama 3's (head, line ends joined), as Llama 2's (dummy space)."""
    return TOKENIZERS[request.param]


def _name(split: str, number: int) -> str:
    """An answer: two passages hold each, and a split has its own."""
    return f"{split[:2]}{number // 2}x"


def _passages(split: str) -> list[str]:
    rng = random.Random(split)

    def sentence(*more: str) -> str:
        words = [*rng.choices(WORDS, k=rng.randint(6, 16)), *more]
        return rng.choice("ABC") + " ".join(words) + rng.choice([".", "!", " J. Do."])

    def passage(number: int) -> str:
        more = (sentence() for _ in range(rng.randint(0, 4)))
        return rng.choice([" ", "\n"]).join([sentence(_name(split, number)), *more])

    return [passage(number) for number in range(60)]


@pytest.fixture
def own_passages(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Made-up texts wherever passages are read from; gives the 60 of a split."""

    def questions(source: str, split: str) -> list[QAItem]:
        texts = _passages(split)
        return [QAItem(str(i), text, f"which name {i}?", (_name(split, i),)) for i, text in enumerate(texts)]

    monkeypatch.setattr(constructed_tasks, "load_qa", questions)
    monkeypatch.setattr(
        constructed_tasks, "boolq_prompts", lambda split: [(p, f"is it {p[:9]}?") for p in _passages(split)]
    )
    monkeypatch.setattr(constructed_tasks, "running_text", _passages)
    return _passages
