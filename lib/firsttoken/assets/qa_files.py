"""Questions with their passages and answers, and the readers for the standard files that users bring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.study.errors import CorpusError
from firsttoken.study.foreign.faults import Damaged, blaming
from firsttoken.study.foreign.json_text import read_json
from firsttoken.study.foreign.schema import shaped

_MOST_BYTES = 1 << 30  # the largest published TriviaQA file has 0.4 GB


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
    with blaming(path, CorpusError, "give the path of a SQuAD or TriviaQA file"):
        content = read_json(Path(path), _MOST_BYTES)
    return read_triviaqa(path) if isinstance(content, dict) and "Data" in content else read_squad(path)


def read_squad(path: str | Path) -> list[QAItem]:
    """Read a SQuAD v1.1 or v2 file (rajpurkar.github.io/SQuAD-explorer); unanswerable questions are dropped.

    Raises CorpusError when the file is missing, truncated or of another format.
    """
    return _items(path, _Squad, "a SQuAD file (data/paragraphs/qas/answers)")


def read_triviaqa(path: str | Path) -> list[QAItem]:
    """Read an official TriviaQA file (nlp.cs.washington.edu/triviaqa) closed book: no passage, all aliases accepted.

    Raises CorpusError when the file is missing, truncated or of another format. The test files hold no answers.
    """
    return _items(path, _TriviaQA, "a TriviaQA file (Data/Question/Answer/Aliases)")


@dataclass(frozen=True)
class _Text:
    text: str


@dataclass(frozen=True)
class _Asked:
    id: str
    question: str
    answers: tuple[_Text, ...]
    is_impossible: bool = False


@dataclass(frozen=True)
class _Paragraph:
    context: str
    qas: tuple[_Asked, ...]


@dataclass(frozen=True)
class _Article:
    paragraphs: tuple[_Paragraph, ...]


@dataclass(frozen=True)
class _Squad:
    data: tuple[_Article, ...]

    def items(self) -> list[QAItem]:
        return [
            QAItem(asked.id, paragraph.context, asked.question.strip(), answers)
            for article in self.data
            for paragraph in article.paragraphs
            for asked in paragraph.qas
            if (answers := distinct(answer.text for answer in asked.answers)) and not asked.is_impossible
        ]


@dataclass(frozen=True)
class _Answer:
    Value: str
    Aliases: tuple[str, ...]


@dataclass(frozen=True)
class _TriviaQuestion:
    QuestionId: str
    Question: str
    Answer: _Answer


@dataclass(frozen=True)
class _TriviaQA:
    Data: tuple[_TriviaQuestion, ...]

    def items(self) -> list[QAItem]:
        return [
            triviaqa_item(entry.QuestionId, entry.Question, entry.Answer.Value, entry.Answer.Aliases)
            for entry in self.Data
        ]


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


def _items(path: str | Path, kind: type[_Squad] | type[_TriviaQA], wanted: str) -> list[QAItem]:
    """The questions in a file of ``kind``."""
    with blaming(path, CorpusError, f"give {wanted}, or download it again"):
        items = shaped(kind, read_json(Path(path), _MOST_BYTES), others=True).items()
        if not items:
            raise Damaged("it holds no answerable question; use the train or dev file")
        return items
