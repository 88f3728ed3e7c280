"""The sets of questions that one package logs as requests, a line each, of which only the question itself is read.

``firsttoken fetch questions`` brings them. They are questions of the validation or test files of their originals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.assets.qa_files import QAItem, distinct
from firsttoken.study.errors import CorpusError
from firsttoken.study.parsing.json_text import json_lines
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_gzip
from firsttoken.study.parsing.schema import parse_as

ASSET = "questions"
PROBLEMS = 164  # of HumanEval


def question_set(name: str) -> list[QAItem]:
    """All questions of a set of ``SETS``, in the order of its file, which may have a line for each of their options.

    Raises AssetError where it was not fetched, and CorpusError for a damaged file or a question without an answer.
    """
    return list(_items(name))


def last_words() -> list[dict[str, str]]:
    """LAMBADA: each ``text``, and the ``word`` that ends it, which only the whole text foretells. Raises as above."""
    return _read("lambada", _last_word)


def code_problems() -> list[str]:
    """HumanEval: the beginning of each function, whose description says what the rest does. Raises as above."""
    return _read("humaneval", lambda doc: _text(doc, "prompt"))


@cache
def _items(name: str) -> tuple[QAItem, ...]:
    files, read = SETS[name]
    items = [item for file in files for item in _read(file, partial(read, file))]
    return tuple({item.id: item for item in items}.values())


def _read(name: str, read: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Return what ``read`` makes of the question in each line of the file ``name``."""
    path = downloaded(ASSET) / f"{name}.jsonl.gz"
    with errors_as(path.name, CorpusError, f"run `firsttoken fetch {ASSET}`"):
        rows = []
        for number, line in json_lines(read_gzip(path)):
            try:
                rows.append(read(parse_as(_Line, line, others=True).doc))
            except ParseError as error:
                raise ParseError(f"line {number}: {error}") from error
        return rows


@dataclass(frozen=True)
class _Line:
    doc: dict[str, Any]


def _text(doc: Any, *keys: str | int) -> str:
    """The text that ``keys`` lead to."""
    value, path = doc, "doc"
    for key in keys:
        path += f".{key}" if isinstance(key, str) else f"[{key}]"
        try:
            value = value[key]
        except (LookupError, TypeError):
            raise ParseError(f"{path} is missing") from None
    return parse_as(str, value, path)


def _answers(doc: dict[str, Any], key: str) -> tuple[str, ...]:
    return distinct(parse_as(tuple[str, ...], doc.get(key), f"doc.{key}"))


def _squad(_: str, doc: dict[str, Any]) -> QAItem:
    before, _, question = _text(doc, "query").rpartition("\nQuestion: ")
    passage = before.partition("\nBackground: ")[2]
    return QAItem(_text(doc, "id"), passage, question.removesuffix("\nAnswer:").strip(), _answers(doc, "answers_text"))


def _coqa(_: str, doc: dict[str, Any]) -> QAItem:
    """A turn of a conversation about a story. The turns before it stand in its question, as a prompt continues them:
    the story alone is the passage, which decides on the split."""
    identity = _text(doc, "id")
    number = identity.rpartition("_turn")[2]
    if not number.isdecimal():
        raise ParseError(f"doc.id: expected STORY_turnN, not {identity!r}")
    turns = [
        (_text(doc, "previous_qa", i, "question"), _text(doc, "previous_qa", i, "answer")) for i in range(int(number))
    ]
    before = "".join(f"{question.strip()}\nAnswer: {answer.strip()}\nQuestion: " for question, answer in turns)
    return QAItem(identity, _text(doc, "story"), before + _text(doc, "question").strip(), _answers(doc, "answers"))


def _drop(_: str, doc: dict[str, Any]) -> QAItem:
    """An answer of several spans is their list, as the prompts of the LM Evaluation Harness have it."""
    spans = parse_as(tuple[tuple[str, ...], ...], doc.get("answers"), "doc.answers")
    answers = distinct(", ".join(answer) for answer in spans)
    return QAItem(_text(doc, "query_id"), _text(doc, "passage"), _text(doc, "question").strip(), answers)


def _jeopardy(name: str, doc: dict[str, Any]) -> QAItem:
    category, _, clue = _text(doc, "query").removesuffix("\nAnswer:").partition("\nQuestion: ")
    return _closed(name, doc, f"{category.removeprefix('Category: ')}: {clue}", _text(doc, "answer"))


def _nq_open(name: str, doc: dict[str, Any]) -> QAItem:
    return _closed(name, doc, _text(doc, "question"), *_answers(doc, "answers"))


def _gsm8k(name: str, doc: dict[str, Any]) -> QAItem:
    return _closed(name, {"index": doc.get("id")}, _text(doc, "question"), _text(doc, "short_answer"))


def _math(name: str, doc: dict[str, Any]) -> QAItem:
    return _closed(name, doc, _text(doc, "problem"), _text(doc, "answer"))


def _closed(name: str, doc: dict[str, Any], question: str, *answers: str) -> QAItem:
    return QAItem(f"{name}-{parse_as(int, doc.get('index'), 'doc.index')}", "", question.strip(), distinct(answers))


def _last_word(doc: dict[str, Any]) -> dict[str, str]:
    word = _text(doc, "answers_text", 0).strip()
    if not word:
        raise ParseError("doc.answers_text[0] is no word")
    return {"text": _text(doc, "query"), "word": word}


def _qasper(_: str, doc: dict[str, Any]) -> QAItem:
    """A question of yes or no about a whole paper: title, abstract, and the paragraphs under their headings."""
    sections = parse_as(_Paper, doc.get("full_text"), "doc.full_text", others=True)
    parts = [_text(doc, "title"), _text(doc, "abstract")]
    for heading, paragraphs in zip(sections.section_name, sections.paragraphs, strict=True):
        parts += [heading or "", *paragraphs]
    answer = _text(doc, "answer")
    choices = ("Yes", "No")
    if answer and answer not in choices:
        raise ParseError(f"doc.answer: expected one of {', '.join(choices)}, not {answer!r}")
    passage, index = "\n".join(part for part in parts if part.strip()), choices.index(answer) if answer else -1
    return QAItem(_text(doc, "question_id"), passage, _text(doc, "question").strip(), (answer,), choices, index)


@dataclass(frozen=True)
class _Paper:
    section_name: tuple[str | None, ...]
    paragraphs: tuple[tuple[str, ...], ...]


_MATH = ("algebra", "counting-and-probability", "geometry", "intermediate-algebra", "number-theory", "prealgebra")
SETS: dict[str, tuple[tuple[str, ...], Callable[[str, dict[str, Any]], QAItem]]] = {
    "squad": (("squad",), _squad),
    "coqa": (("coqa",), _coqa),
    "drop": (("drop",), _drop),
    "jeopardy": (("jeopardy",), _jeopardy),
    "nq-open": (("nq-open",), _nq_open),
    "gsm8k": (("gsm8k",), _gsm8k),
    "math": (tuple(f"math-{part}" for part in (*_MATH, "precalculus")), _math),
    "qasper": (("qasper",), _qasper),
}
"""The sets of questions with answers by name: their files, and how a question of one is read."""
