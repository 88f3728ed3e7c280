"""One set of test items, put to every variant of the model alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.corpora import load_qa, running_text, token_windows
from firsttoken.assets.needs import CONTEXT, Need, questions_of, text_of
from firsttoken.progressiveserve.quality import AnswerConfig, Score, answer_scores, text_scores
from firsttoken.progressiveserve.quality_gates import CLOSED_BOOK, EXTRACTIVE
from firsttoken.scoring import exact_match
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import non_empty, unknown
from firsttoken.study.profile import build_config
from firsttoken.study.summary import Rows


@dataclass(frozen=True)
class QualityConfig:
    """The items that every variant is asked: test ``items`` of ``questions``, ``closed_book`` questions, ``windows`` of
    text.

    ``judged`` is the task whose EM and F1 speak for a stage, "extractive" or "closed_book" (as KIISE Table 1 has it).
    Prompts of more than ``max_prompt_tokens`` lose their beginning, and their rows say how much.
    """

    questions: str
    items: int
    closed_book_questions: str
    closed_book: int
    windows: int
    window_tokens: int
    batch: int
    recipes: Annotated[tuple[str, ...], non_empty]
    judged: str = EXTRACTIVE
    max_prompt_tokens: int = AnswerConfig.max_prompt_tokens

    def __post_init__(self) -> None:
        sizes = {EXTRACTIVE: self.items, CLOSED_BOOK: self.closed_book}
        if self.judged not in sizes:
            raise ProfileError(f"quality.judged: no task {self.judged!r}; {unknown(self.judged, sizes)}")
        if sizes[self.judged] < 1:
            key = "items" if self.judged == EXTRACTIVE else "closed_book"
            raise ProfileError(f"quality.{key}: {self.judged} questions are judged, ask at least 1")

    @classmethod
    def recorded(cls, parameters: Mapping[str, Any]) -> QualityConfig:
        """Return the configuration of a result with ``parameters``; what it was recorded without has its default.

        Raises ProfileError for a key that is unknown now.
        """
        return build_config(cls, parameters["quality"], "the recorded section quality")

    def needs(self) -> list[Need]:
        """Require that the test splits hold every item and window, and the context a prompt with its answer."""
        return [
            Need("quality.items", self.items, questions_of(self.questions, "test")),
            Need("quality.closed_book", self.closed_book, questions_of(self.closed_book_questions, "test")),
            Need("quality.windows x window_tokens", self.windows * self.window_tokens, text_of("test")),
            Need("quality.window_tokens", self.window_tokens, CONTEXT),
            Need("quality.max_prompt_tokens", self.max_prompt_tokens + AnswerConfig.max_new_tokens, CONTEXT),
        ]

    def smaller(self, items: int, windows: int) -> QualityConfig:
        """Return this configuration with ``items`` questions of the judged task alone, and ``windows``."""
        sizes = {"items": 0, "closed_book": 0} | {"items" if self.judged == EXTRACTIVE else "closed_book": items}
        return dataclasses.replace(self, windows=windows, **sizes)


class Evaluation:
    """One set of test items, put to every variant alike; exact matches are counted by ``score``."""

    def __init__(self, config: QualityConfig, tokenizer: PreTrainedTokenizerBase, score: Score = exact_match) -> None:
        self._tokenizer, self._score = tokenizer, score
        self._answers = AnswerConfig(max_prompt_tokens=config.max_prompt_tokens, batch=config.batch)
        requested = {
            EXTRACTIVE: (config.questions, config.items),
            CLOSED_BOOK: (config.closed_book_questions, config.closed_book),
        }
        self._items = {task: load_qa(source, "test")[:count] for task, (source, count) in requested.items() if count}
        self._windows = token_windows(running_text("test"), tokenizer, config.window_tokens, config.windows)

    def rows(self, variant: str, model: PreTrainedModel) -> Rows:
        """Return all rows of one variant."""
        label = {"variant": variant}
        table = [
            label | {"task": task} | row
            for task, items in self._items.items()
            for row in answer_scores(model, self._tokenizer, items, self._answers, self._score)
        ]
        return table + [label | {"task": "text"} | row for row in text_scores(model, self._windows)]

    @torch.inference_mode()
    def logits(self, model: PreTrainedModel) -> torch.Tensor:
        """Logits [1, tokens, vocabulary] of the first window."""
        return model(self._windows[:1].to(model.device), use_cache=False).logits
