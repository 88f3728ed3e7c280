"""One set of test items, put to every variant of the model alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.corpora import load_qa, running_text, token_windows
from firsttoken.progressive.quality import AnswerConfig, answer_scores, text_scores
from firsttoken.study.record import Rows


@dataclass(frozen=True)
class QualityConfig:
    """What every variant answers: test ``items`` of ``questions``, ``closed_book`` questions, ``windows`` of text."""

    questions: str
    items: int
    closed_book_questions: str
    closed_book: int
    windows: int
    window_tokens: int
    batch: int
    recipes: tuple[str, ...]


class Examination:
    """One set of test items, put to every variant alike."""

    def __init__(self, config: QualityConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._answers = AnswerConfig(batch=config.batch)
        self._items = {"extractive": load_qa(config.questions, "test")[: config.items]}
        if config.closed_book:
            self._items["closed_book"] = load_qa(config.closed_book_questions, "test")[: config.closed_book]
        self._windows = token_windows(running_text("test"), tokenizer, config.window_tokens, config.windows)

    def rows(self, variant: str, model: PreTrainedModel) -> Rows:
        """All rows of one variant."""
        label = {"variant": variant}
        found = [
            label | {"task": task} | row
            for task, items in self._items.items()
            for row in answer_scores(model, self._tokenizer, items, self._answers)
        ]
        return found + [label | {"task": "text"} | row for row in text_scores(model, self._windows)]

    @torch.inference_mode()
    def logits(self, model: PreTrainedModel) -> torch.Tensor:
        """Logits [1, tokens, vocabulary] of the first window."""
        return model(self._windows[:1].to(model.device), use_cache=False).logits
