"""The ShareGPT file, which is one JSON list that may break off anywhere: question and answer of each conversation."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from firsttoken.study.errors import CorpusError
from firsttoken.study.foreign.faults import Damaged, regular_size

_CHUNK = 1 << 22  # bytes; the longest conversation of the pinned file has 437,874
_SPACE = re.compile(r"\s*")
_ROLES = ("human", "gpt")


def first_pairs(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of every conversation: its first human turn that the model answers at once.

    vLLM's benchmark_serving takes the first two turns, whoever wrote them; of the pinned file a third would then be
    answers that pose as prompts, as long conversations were split and their later parts begin with an answer. The
    pairs come in the order of a hash of their text, so that any beginning is a fair sample. Records that are no
    conversation (a turn that is null) are passed by, and a warning says how many. Raises CorpusError for a
    file without such pairs, or that is no list of conversations; a last record that breaks off is left out.
    """
    pairs: list[tuple[str, str]] = []
    passed_by: list[int] = []
    for number, record in enumerate(read_records(path), 1):
        try:
            turns = [(turn["from"], turn["value"]) for turn in record["conversations"]]
            if not all(isinstance(part, str) for turn in turns for part in turn):
                raise TypeError
        except (TypeError, KeyError, AttributeError):
            passed_by.append(number)
            continue
        answered = ((a, b) for (asker, a), (teller, b) in pairwise(turns) if (asker, teller) == _ROLES)
        pairs += [(_encodable(a), _encodable(b)) for a, b in islice(answered, 1)]
    what = "no conversation of turns with `from` and `value`"
    if passed_by and not pairs:
        raise CorpusError(f"{path}, record {passed_by[0]}: it is {what}; use a ShareGPT file")
    if not pairs:
        raise CorpusError(f"{path} has no question that is answered; it is cut too early or of another format")
    if passed_by:
        warnings.warn(
            f"{path}: {len(passed_by)} records are {what} and were passed by, first record {passed_by[0]}", stacklevel=2
        )
    return sorted(pairs, key=lambda pair: hashlib.sha256("\n".join(pair).encode()).digest())


def read_records(path: Path) -> Iterator[Any]:
    """The complete records of a JSON list, one after the other, with no more in memory than a chunk and a record.

    Raises CorpusError for a file that cannot be read, and for what is no JSON list, other than that it ends early.
    """
    decode = json.JSONDecoder().raw_decode
    text, opened, closed, between, number = "", False, False, False, 0
    for more in _chunks(path):
        text, at = text + more, 0
        if not opened and (text := text.lstrip()):
            if text[0] != "[":
                raise CorpusError(f"{path} is no JSON list of conversations; use a ShareGPT .json file")
            opened, at = True, 1
        while (at := _SPACE.match(text, at).end()) < len(text):
            if closed or (between and text[at] not in ",]"):
                what = "text after the end of the list" if closed else f"no comma after record {number}"
                raise CorpusError(f"{path}: there is {what}; download the file again")
            if text[at] == "]" and (between or not number):
                closed, at = True, at + 1
                continue
            if between:
                between, at = False, at + 1
                continue
            try:
                record, at = decode(text, at)
            except RecursionError as error:
                raise CorpusError(f"{path}: record {number + 1} is too deep; use a ShareGPT file") from error
            except json.JSONDecodeError as error:
                if _ends_early(error, text):
                    break
                raise CorpusError(
                    f"{path}: there is no JSON after record {number} ({error.msg}); download the file again"
                ) from error
            number, between = number + 1, True
            yield record
        text = text[at:]


def _chunks(path: Path) -> Iterator[str]:
    """The text of a file; a letter that the file's end cuts in two is left out."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        regular_size(path)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield decoder.decode(chunk)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text; unpack it if it is compressed, or download it again") from error
    except (OSError, Damaged) as error:
        reason = error if isinstance(error, Damaged) else error.strerror
        raise CorpusError(f"cannot read {path}: {reason}; check the path") from error


def _ends_early(error: json.JSONDecodeError, text: str) -> bool:
    """Whether more text could mend it: an open string, or a fault in the last letters (half an escape, half a word)."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()) - 8


def _encodable(text: str) -> str:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
