"""Tables of measurements as CSV: columns by name, numbers checked, one error line that names file, line and mend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from firsttoken.study.errors import CorpusError
from firsttoken.study.parsing.csv_text import columns, numbered, plain_number, records
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, shown

MEND = "profile it again, or take another copy"
_MOST = 1e12  # microseconds, tokens, requests: beyond every measurement


def rows(path: Path, names: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line, text by column) of a CSV file with the columns ``names``. Raises CorpusError."""
    with errors_as(path, CorpusError, MEND):
        lines = numbered(path)
        present = columns(*next(lines, (1, "")))
        if missing := [name for name in names if name not in present]:
            raise ParseError(f"has no column {', '.join(missing)}")
        table = list(records(lines, present))
        if not table:
            raise ParseError("holds no measurement")
    return table


def number(path: Path, line: int, row: Mapping[str, str], name: str, *, least: float = 0.0) -> float:
    """The value of column ``name``. Raises CorpusError for what is no number, and for one below ``least``."""
    try:
        value = plain_number(row[name])
    except ValueError:
        value = math.nan
    if not least <= value <= _MOST:
        floor = f" from {least:g} on" if math.isfinite(least) else ""
        raise CorpusError(f"{path}, line {line}: {name} is {shown(row[name])}, it must be a number{floor}; {MEND}")
    return value
