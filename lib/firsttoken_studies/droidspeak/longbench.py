"""The six LongBench sets of the paper (DroidSpeak, 5.1), read from their .jsonl files; prompts in our own words.

The question opens the prefix, as in the constructed tasks. Scores are LongBench's but for three things: ROUGE-L is that
of the rouge-score package (LongBench takes the package ``rouge``, which unites sentences), edit similarity is not
rounded to whole per cents, and the indentation of code does not count, because answers are stripped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from firsttoken.assets.corpora import SPLITS
from firsttoken.scoring import edit_similarity, rouge_l, token_f1
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError
from firsttoken.study.parsing.json_text import json_lines
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_bytes, shown
from firsttoken.study.parsing.schema import non_empty, parse_as
from firsttoken_studies.droidspeak.reuse_items import Task, TaskItem

_EDGES = {"train": (0.0, 0.25), "validation": (0.25, 0.30), "test": (0.30, 1.0)}  # of 200 items, 50 to profile on
_COMMENT = ("`", "#", "//")


def code_similarity(prediction: str, answers: Iterable[str]) -> float:
    """Edit similarity, in 0..1, of the first line of ``prediction`` without a comment or fence, as in LongBench."""
    lines = prediction.strip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in _COMMENT)), "")
    return edit_similarity(code.strip(), [answer.strip() for answer in answers])


@dataclass(frozen=True)
class _Set:
    """The words around a context; ``head`` may hold the row's {input}. The suffix opens the answer."""

    head: str
    suffix: str
    task: Task
    joins_input: bool = False  # the row's input is the end of the context


_CODE = Task("edit similarity", code_similarity, 64)
_SETS = {
    "hotpotqa": _Set("Question: {input}", "\nAnswer:", Task("F1", token_f1, 32)),
    "2wikimqa": _Set("Question: {input}", "\nAnswer:", Task("F1", token_f1, 32)),
    "multifieldqa_en": _Set("Question: {input}", "\nAnswer:", Task("F1", token_f1, 64)),
    "multi_news": _Set("News about one event", "\nSummary:", Task("ROUGE-L", rouge_l, 512, stop="")),
    "lcc": _Set("Code to be continued", "\nNext line:", _CODE),
    "repobench-p": _Set("Code to be continued", "\nNext line:", _CODE, joins_input=True),
}

TASKS = {name: dataset_set.task for name, dataset_set in _SETS.items()}


@dataclass(frozen=True)
class Row:
    """One line of a file, with the fields that are used; ``dataset`` is one of ``TASKS``."""

    id: str
    dataset: str
    input: str
    context: str
    answers: tuple[str, ...]


def read(path: str | Path) -> list[Row]:
    """The rows of a LongBench file, also of LongBench-E.

    Raises CorpusError naming line and field where a line is torn, lacks a field, or is of a set that is not used here.
    """
    path = paths.expanded(path)
    with errors_as(path, CorpusError, "give a LongBench .jsonl file, or download it again"):
        rows = [_row(fields, f"line {number}") for number, fields in json_lines(read_bytes(path))]
        if not rows:
            raise ParseError("it is empty")
        return rows


def items(
    path: str | Path, split: str, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int | None
) -> list[TaskItem]:
    """The first ``count`` items (None: all) of a split of the file, in a fixed shuffle, prefixes of ``tokens`` at most.

    A hash of the context cuts 25 % train, 5 % validation, 70 % test: the paper profiles on 50 contexts. Of a longer
    context the middle is left out, as LongBench does. Raises CorpusError as ``read`` does, for an unknown split, for
    too few items, and when a question alone is longer than ``tokens``.
    """
    rows = _part(path, split)
    if count is not None and len(rows) < count:
        raise CorpusError(f"{path} has {len(rows)} items of {split}, {count} are asked for; ask for fewer")
    rows.sort(key=lambda row: _unit(f"{row.context}\n{row.input}"))
    return [_item(row, tokenizer, tokens) for row in rows[:count]]


def size(path: str | Path, split: str) -> int:
    """Count the items in a split of the file. Raises CorpusError as ``read`` does, or for an unknown split."""
    return len(_part(path, split))


def _part(path: str | Path, split: str) -> list[Row]:
    if split not in _EDGES:
        raise CorpusError(f"no split is called {split!r}; known: {', '.join(SPLITS)}")
    low, high = _EDGES[split]
    return [row for row in read(path) if low <= _unit(row.context) < high]


def _item(row: Row, tokenizer: PreTrainedTokenizerBase, tokens: int) -> TaskItem:
    dataset = _SETS[row.dataset]
    body = row.context + (row.input if dataset.joins_input else "")
    ids = tokenizer.encode(body.strip("\n"), add_special_tokens=False)
    kept_tokens = max(2, min(len(ids), tokens))
    while kept_tokens > 1:
        prefix = f"{dataset.head.format(input=row.input.strip())}\n\n{_without_middle(ids, kept_tokens, tokenizer)}\n"
        excess = len(tokenizer.encode(prefix)) - tokens
        if excess <= 0:
            return TaskItem(f"{row.dataset}-{row.id}", row.dataset, prefix, dataset.suffix, row.answers)
        kept_tokens -= excess
    raise CorpusError(f"the question of {row.dataset}-{row.id} leaves no room in {tokens} tokens; allow more")


def _without_middle(ids: list[int], kept_tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of ``ids``, or of the first and last ``kept_tokens`` // 2 where there are more than ``kept_tokens``."""
    if len(ids) <= kept_tokens:
        return tokenizer.decode(ids)
    return tokenizer.decode(ids[: kept_tokens // 2]) + tokenizer.decode(ids[-(kept_tokens // 2) :])


@dataclass(frozen=True)
class _LongBenchLine:
    _id: str
    dataset: str
    input: str
    context: str
    answers: Annotated[tuple[str, ...], non_empty]


def _row(fields: Any, location: str) -> Row:
    line = parse_as(_LongBenchLine, fields, location, others=True)
    dataset = line.dataset.removesuffix("_e")
    if dataset not in _SETS:
        raise ParseError(f"{location}: no set called {shown(dataset)} is used here; known: {', '.join(_SETS)}")
    return Row(line._id, dataset, line.input, line.context, line.answers)


def _unit(text: str) -> float:
    """A fixed pseudo-random number in [0, 1) from a text."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:13], 16) / 16**13
