"""Questions with their passages and answers, and the readers for the standard files that users bring."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.study.errors import CorpusError


@dataclass(frozen=True)
class QAItem:
    """One question. ``answers`` are all accepted, the first is the canonical one; ``passage`` is "" for closed book.

    ``choices`` are the options of a multiple-choice question and ``answer_index`` the right one, else () and -1.
    """

    id: str
    passage: str
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    answer_index: int = -1


def read_qa(path: str | Path) -> list[QAItem]:
    """Read a SQuAD or TriviaQA JSON file, told apart by its top-level key. Raises CorpusError for anything else."""
    content = _json(Path(path))
    if isinstance(content, dict) and "Data" in content:
        return read_triviaqa(path)
    return read_squad(path)


def read_squad(path: str | Path) -> list[QAItem]:
    """Read a SQuAD v1.1 or v2 file (rajpurkar.github.io/SQuAD-explorer); unanswerable questions are dropped.

    Raises CorpusError when the file is missing, truncated or of another format.
    """
    path = Path(path)
    content = _json(path)
    try:
        items = [
            QAItem(str(qa["id"]), paragraph["context"], qa["question"].strip(), answers)
            for article in content["data"]
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
            if (answers := distinct(answer["text"] for answer in qa["answers"])) and not qa.get("is_impossible")
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"{path} is no SQuAD file (data/paragraphs/qas/answers); at fault: {error}") from error
    return _not_empty(items, path)


def read_triviaqa(path: str | Path) -> list[QAItem]:
    """Read an official TriviaQA file (nlp.cs.washington.edu/triviaqa) closed book: no passage, all aliases accepted.

    Raises CorpusError when the file is missing, truncated or of another format. The test files hold no answers.
    """
    path = Path(path)
    content = _json(path)
    try:
        items = [
            triviaqa_item(entry["QuestionId"], entry["Question"], entry["Answer"]["Value"], entry["Answer"]["Aliases"])
            for entry in content["Data"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"{path} is no TriviaQA file (Data/Question/Answer/Aliases); at fault: {error}") from error
    return _not_empty(items, path)


def read_hub(name: str, config: str | None, split: str) -> list[QAItem]:
    """Read a SQuAD- or TriviaQA-shaped data set of the Hugging Face Hub; ``split`` is the Hub's own.

    Raises CorpusError when the Hub cannot be reached and the set is not in its cache, or when the rows have other
    columns.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:  # datasets passes on whatever its file systems and HTTP clients raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorpusError(
            f"the data set {name} ({split}) is not in the Hub's cache and cannot be loaded: {reason}; "
            "a SQuAD or TriviaQA .json file works too"
        ) from error
    try:
        return [_hub_item(row) for row in rows if "answers" not in row or row["answers"]["text"]]
    except (KeyError, TypeError) as error:
        raise CorpusError(f"{name} has neither SQuAD's nor TriviaQA's columns; at fault: {error}") from error


def triviaqa_item(identity: str, question: str, value: str, aliases: Iterable[str]) -> QAItem:
    """A closed-book item whose canonical answer is ``value``."""
    return QAItem(str(identity), "", question.strip(), distinct([value, *aliases]))


def distinct(answers: Iterable[str]) -> tuple[str, ...]:
    """The answers stripped, without empty ones and repetitions, in their order."""
    return tuple(dict.fromkeys(text for answer in answers if (text := answer.strip())))


def _hub_item(row: dict[str, Any]) -> QAItem:
    if "answers" in row:
        return QAItem(str(row["id"]), row["context"], row["question"].strip(), distinct(row["answers"]["text"]))
    return triviaqa_item(row["question_id"], row["question"], row["answer"]["value"], row["answer"]["aliases"])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}; give the path of a SQuAD or TriviaQA file") from error
    except ValueError as error:
        raise CorpusError(f"{path} is truncated or no JSON ({error}); download it again") from error


def _not_empty(items: list[QAItem], path: Path) -> list[QAItem]:
    if not items:
        raise CorpusError(f"{path} holds no answerable question; use the train or dev file")
    return items
