"""The pinned train file of BoolQ, whose lines hold "title -- passage\\nQuestion: ...?\\nAnswer:", once an answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from firsttoken.study.errors import CorpusError
from firsttoken.study.foreign.faults import blaming
from firsttoken.study.foreign.json_text import json_lines
from firsttoken.study.foreign.packed import read_gzip
from firsttoken.study.foreign.schema import shaped


@dataclass(frozen=True)
class _Doc:
    query: str


@dataclass(frozen=True)
class _BoolqLine:
    doc: _Doc


def read_boolq_train(path: Path) -> list[tuple[str, str]]:
    """(passage, question) of every line; a passage may be "". Raises CorpusError for a file that is damaged."""
    with blaming(path.name, CorpusError, "delete it and run `firsttoken fetch`"):
        found = []
        for _, line in json_lines(read_gzip(path)):
            text, _, question = shaped(_BoolqLine, line, others=True).doc.query.rpartition("\nQuestion: ")
            found.append((text.partition(" -- ")[2].strip(), question.removesuffix("\nAnswer:")))
        return found
