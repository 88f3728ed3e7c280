"""Tables of measurements as CSV: columns by name, numbers checked, one error line that names file, line and mend."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from firsttoken.study.errors import CorpusError

MEND = "profile it again, or take another copy"


def rows(path: Path, names: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line, values by column) of a CSV file with the columns ``names``. Raises CorpusError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                raise CorpusError(f"{path}: has no column {', '.join(missing)}; {MEND}")
            found = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CorpusError(f"{path}: cannot be read ({error}); {MEND}") from error
    if not found:
        raise CorpusError(f"{path}: holds no measurement; {MEND}")
    return found


def number(path: Path, line: int, row: Mapping[str, str], name: str, *, least: float = 0.0) -> float:
    """The finite value of column ``name``. Raises CorpusError for what is none, or below ``least``."""
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        floor = f" from {least:g} on" if math.isfinite(least) else ""
        raise CorpusError(f"{path}, line {line}: {name} is {row[name]!r}, it must be a number{floor}; {MEND}")
    return value
