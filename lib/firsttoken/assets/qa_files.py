"""Questions with their passages and answers, and the readers for the standard files that users bring."""

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.assets.lock import asset_path, pinned
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError, first_line
from firsttoken.study.files import replacing
from firsttoken.study.parsing.json_text import json_lines, read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_gzip, shown
from firsttoken.study.parsing.schema import parse_as

# The pinned train file of BoolQ, whose lines hold "title -- passage\nQuestion: ...?\nAnswer:", once an answer.


@dataclass(frozen=True)
class _Doc:
    query: str


@dataclass(frozen=True)
class _BoolqLine:
    doc: _Doc


def read_boolq_train(path: Path) -> list[tuple[str, str]]:
    """(passage, question) of every line; a passage may be "". Raises CorpusError for a file that is damaged."""
    with errors_as(path.name, CorpusError, "delete it and run `firsttoken fetch`"):
        rows = []
        for _, line in json_lines(read_gzip(path)):
            text, _, question = parse_as(_BoolqLine, line, others=True).doc.query.rpartition("\nQuestion: ")
            rows.append((text.partition(" -- ")[2].strip(), question.removesuffix("\nAnswer:")))
        return rows


# The rows of a pinned Arrow file, kept as plain JSON once read: a measuring machine need not have pyarrow.


def arrow_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a pinned Arrow IPC stream such as "sciq-validation.arrow".

    They come from a copy in CACHE/rows where there is a sound one, else from the Arrow file, and are then kept there:
    copy CACHE/rows to a machine that has no pyarrow. Raises AssetError when neither is present or the asset is damaged,
    and CorpusError when the content cannot be read.
    """
    return kept_rows(f"{Path(name).stem}-{pinned(name).sha256[:12]}", lambda: _read_arrow(asset_path(name)))


def kept_rows(name: str, make: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Return the rows that CACHE/rows keeps as ``name``, where they are sound, else those of ``make``, which are then
    kept.

    A pair comes back as a list. Raises CorpusError where a folder is in their place, and what ``make`` raises.
    """
    cache_file = paths.CACHE / "rows" / f"{name}.jsonl.gz"
    if not (rows := _cached_rows(cache_file)):
        if cache_file.is_dir():
            raise CorpusError(f"{cache_file} is a folder, where a copy of the rows is kept; remove it")
        rows = make()
        with replacing(cache_file) as partial, gzip.open(partial, "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def _cached_rows(path: Path) -> list[Any]:
    """The rows in a copy; none where there is none, or gzip's own sum does not fit: it is then made again."""
    try:
        with errors_as(path, CorpusError, "it is made again"):
            return [row for _, row in json_lines(read_gzip(path))]
    except CorpusError:
        return []


def _read_arrow(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise CorpusError(f"{path.name} needs pyarrow: install it, or copy .cache/rows from where it is") from error
    with errors_as(path.name, CorpusError, "run `firsttoken fetch`"), pa.memory_map(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()  # pa.ArrowInvalid is a ValueError
        table.validate(full=True)  # offsets that lead outside would end the process
        return table.to_pylist()


_MOST_BYTES = 1 << 30  # the largest published TriviaQA file has 0.4 GB


@dataclass(frozen=True)
class QAItem:
    """One question. ``answers`` are all accepted, the first is the canonical one; ``passage`` is "" for closed book.

    ``choices`` are the options of a multiple-choice question and ``answer_index`` the right one, else () and -1.
    Raises ParseError where there is no answer: none could be right.
    """

    id: str
    passage: str
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    answer_index: int = -1

    def __post_init__(self) -> None:
        if not self.answers:
            raise ParseError(f"the question {shown(self.id)} has no answer")


def read_qa(path: str | Path) -> list[QAItem]:
    """Read a SQuAD v1.1 or v2 file (rajpurkar.github.io/SQuAD-explorer) without its unanswerable questions, or an
    official TriviaQA file (nlp.cs.washington.edu/triviaqa) closed book: no passage, all aliases accepted.

    Raises CorpusError when the file is missing, truncated or of another format. TriviaQA's test files hold no answers.
    """
    with errors_as(path, CorpusError, "give the path of a SQuAD or TriviaQA file"):
        content = read_json(Path(path), _MOST_BYTES)
    is_trivia = isinstance(content, dict) and "Data" in content
    wanted = "TriviaQA file (Data/Question/Answer/Aliases)" if is_trivia else "SQuAD file (data/paragraphs/qas/answers)"
    with errors_as(path, CorpusError, f"give a {wanted}, or download it again"):
        items = parse_as(_TriviaQA if is_trivia else _Squad, content, others=True).items()
        if not items:
            raise ParseError("it holds no answerable question; use the train or dev file")
        return items


@dataclass(frozen=True)
class _Text:
    text: str


@dataclass(frozen=True)
class _SquadQuestion:
    id: str
    question: str
    answers: tuple[_Text, ...]
    is_impossible: bool = False


@dataclass(frozen=True)
class _Paragraph:
    context: str
    qas: tuple[_SquadQuestion, ...]


@dataclass(frozen=True)
class _Article:
    paragraphs: tuple[_Paragraph, ...]


@dataclass(frozen=True)
class _Squad:
    data: tuple[_Article, ...]

    def items(self) -> list[QAItem]:
        return [
            QAItem(question.id, paragraph.context, question.question.strip(), answers)
            for article in self.data
            for paragraph in article.paragraphs
            for question in paragraph.qas
            if (answers := distinct(answer.text for answer in question.answers)) and not question.is_impossible
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
        raise CorpusError(
            f"the data set {name} ({split}) is not in the Hub's cache and cannot be loaded: {first_line(error)}; "
            "a SQuAD or TriviaQA .json file works too"
        ) from error
    try:
        return [
            QAItem(str(row["id"]), row["context"], row["question"].strip(), distinct(row["answers"]["text"]))
            if "answers" in row
            else triviaqa_item(row["question_id"], row["question"], row["answer"]["value"], row["answer"]["aliases"])
            for row in rows
            if "answers" not in row or row["answers"]["text"]
        ]
    except ParseError as error:
        raise CorpusError(f"{name} ({split}): {error}; name another split") from error
    except (KeyError, TypeError) as error:
        raise CorpusError(f"{name} has neither SQuAD's nor TriviaQA's columns; at fault: {error}") from error


def triviaqa_item(identity: str, question: str, value: str, aliases: Iterable[str]) -> QAItem:
    """A closed-book item whose canonical answer is ``value``."""
    return QAItem(str(identity), "", question.strip(), distinct([value, *aliases]))


def distinct(answers: Iterable[str]) -> tuple[str, ...]:
    """The answers stripped, without empty ones and repetitions, in their order."""
    return tuple(dict.fromkeys(text for answer in answers if (text := answer.strip())))
