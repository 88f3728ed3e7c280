"""Texts line by line, and CSV with a header among them: columns by name, every line as wide as the header."""

import codecs
import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path

from firsttoken.study.parsing.parse_errors import ParseError, regular_size, shown
from firsttoken.study.progress import track

_LONGEST = 1 << 20  # bytes of a line
_PLAIN = re.compile(r"\s*-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d{1,2})?\s*")
Lines = Iterator[tuple[int, str]]


def numbered(path: Path) -> Lines:
    """The lines with something on them, numbered from 1; a progress bar where reading takes more than five seconds.

    Raises OSError, and ParseError for what is no regular file, no UTF-8 text, or has a line of more than 1 MiB.
    """
    regular_size(path)
    label = {"desc": path.name, "unit": "B", "delay": 5}
    with path.open("rb") as file, track(total=path.stat().st_size, **label) as bar:
        number = 0
        while raw := file.readline(_LONGEST):
            number += 1
            bar.update(len(raw))
            if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ParseError("it is UTF-16 text; save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`)")
            if len(raw) == _LONGEST and not raw.endswith(b"\n"):
                raise ParseError(f"line {number}: it has more than {_LONGEST:,} bytes")
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ParseError(f"line {number}: this is no UTF-8 text; is the file compressed?") from error
            if line:
                yield number, line


def columns(number: int, line: str) -> list[str]:
    """The names that a header has. Raises ParseError for one that is there twice, and for what is no CSV."""
    names = [name.strip() for name in _fields(number, line)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ParseError(f"line {number}: the column {shown(twice)} is there twice; name each once")
    return names


def records(lines: Lines, names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, text by column) of what follows a header. Raises ParseError for a line of another width."""
    for number, line in lines:
        fields = _fields(number, line)
        if len(fields) != len(names):
            raise ParseError(f"line {number}: it has {len(fields)} fields and the header {len(names)}")
        yield number, dict(zip(names, fields, strict=True))


def plain_number(text: str) -> float:
    """A finite number as files spell it. Raises ValueError for all else, Python's own spellings (1_0, inf) too."""
    if not _PLAIN.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _fields(number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ParseError(f"line {number}: it is no CSV ({error})") from error
