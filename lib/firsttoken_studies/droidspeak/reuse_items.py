"""One item of a task as text, the same as tokens, and how its answer is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

STOP = "\n"  # an answer is one line: the same stop in training and in decoding


@dataclass(frozen=True)
class TaskItem:
    """``prefix`` is what sender and receiver share, ``suffix`` opens the answer; all ``answers`` are accepted.

    The first answer is the one to train on.
    """

    id: str
    task: str
    prefix: str
    suffix: str
    answers: tuple[str, ...]

    @property
    def target(self) -> str:
        """Return the text that should follow the suffix, the stop included."""
        return f" {self.answers[0]}{STOP}"


@dataclass(frozen=True)
class Encoded:
    """An item as token ids; the three in a row are one training sequence. Only ``prefix`` has the tokenizer's head."""

    item: TaskItem
    prefix: list[int]
    suffix: list[int]
    target: list[int]

    @property
    def tokens(self) -> tuple[list[int], list[int], list[int]]:
        return self.prefix, self.suffix, self.target


@dataclass(frozen=True)
class Task:
    """A task's answers and their score: an answer has at most ``answer_tokens`` new tokens, up to ``stop`` ("": none).

    ``score`` is in 0..1, of a prediction against the accepted answers; ``metric`` is its name in tables.
    """

    metric: str
    score: Callable[[str, Iterable[str]], float]
    answer_tokens: int
    stop: str = STOP


def encode(item: TaskItem, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """``item`` as tokens: those of the whole text, wherever the tokenizer joins nothing across the two seams."""
    return Encoded(
        item,
        tokenizer.encode(item.prefix),
        _continuation(tokenizer, item.prefix, item.suffix),
        _continuation(tokenizer, item.suffix, item.target),
    )


def _continuation(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """The tokens of ``text`` as it continues ``before``: encoded alone, SentencePiece would put a space before it.

    Where the tokenizer joins across the seam (Llama 3 makes two line ends one token), ``text`` is encoded alone: the
    prefix was tokenised before anyone knew what would follow.
    """
    start, encoded = tokenizer.encode(before), tokenizer.encode(before + text)
    if encoded[: len(start)] == start:
        return encoded[len(start) :]
    return tokenizer.encode(text, add_special_tokens=False)
