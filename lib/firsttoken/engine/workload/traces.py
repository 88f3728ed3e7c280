"""Arrival traces of real services: Azure LLM inference, BurstGPT and Mooncake, as their authors publish them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from firsttoken.engine.workload.items import Item
from firsttoken.study.errors import CorpusError
from firsttoken.study.foreign.csv_text import Lines, columns, numbered, plain_number, records
from firsttoken.study.foreign.faults import Damaged, blaming, shown
from firsttoken.study.foreign.json_text import parse_json

_MOST = 1e15  # a time in ms; tokens have a limit of their own
_MOST_TOKENS = 10**8


@dataclass(frozen=True)
class RequestTrace:
    """A trace as read; ``dropped`` requests had no prompt or no answer (BurstGPT: failures)."""

    format: str
    items: tuple[Item, ...]
    dropped: int


@dataclass(frozen=True)
class _Format:
    """The columns (or JSON fields) of a published trace, and how its time becomes seconds."""

    name: str
    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


def _number(value: Any) -> float:
    """A number as a trace writes it."""
    if isinstance(value, bool):
        raise ValueError
    number = plain_number(value) if isinstance(value, str) else float(value)
    if not abs(number) <= _MOST:
        raise ValueError
    return number


def _seconds(value: Any) -> float:
    """Seconds since a service began."""
    if (number := _number(value)) < 0:
        raise ValueError
    return number


def _clock(value: Any) -> float:
    """Seconds of "2023-11-16 18:15:46.6805900" (2023) or "2024-05-10 00:00:00.009930+00:00" (2024)."""
    moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_AZURE = _Format("Azure LLM inference", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _clock)
# release 2.0 has two more columns (Session ID, Elapsed time): columns are found by name
_BURSTGPT = _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _seconds)
_MOONCAKE = _Format("Mooncake", "timestamp", "input_length", "output_length", lambda value: _seconds(value) / 1000)


def read_trace(path: str | Path, limit: int | None = None) -> tuple[Item, ...]:
    """The items of ``load_trace``: a workload without token ids."""
    return load_trace(path, limit).items


def load_trace(path: str | Path, limit: int | None = None) -> RequestTrace:
    """Read a trace file, or its first ``limit`` requests that have a prompt and an answer; what it is, it says itself.

    Times are seconds since the first request read, to the microsecond; items are sorted by them. Raises CorpusError
    naming file, line and mend for a file that cannot be read, is empty, not UTF-8 or of another format, for a torn
    line, and for a value that is no number or negative.
    """
    path = Path(path).expanduser()
    if limit is not None and limit < 1:
        raise CorpusError(f"{path.name}: at least 1 request must be read, not {limit}")
    rows: list[tuple[float, int, int]] = []
    dropped = 0
    with blaming(path, CorpusError, "mend the line, or download the file again"), closing(numbered(path)) as lines:
        shape, values = _opened(lines)
        for line, row in values:
            time, prompt, output = _parsed(line, shape, row)
            if prompt and output:
                rows.append((time, prompt, output))
            else:
                dropped += 1
            if len(rows) == limit:
                break
    if not rows:
        raise CorpusError(f"{path} has no request with a prompt and an answer ({dropped} without); use another file")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return RequestTrace(shape.name, tuple(Item(round(t - start, 6), p, o) for t, p, o in rows), dropped)


def _opened(lines: Lines) -> tuple[_Format, Iterator[tuple[int, list[Any]]]]:
    """The format, and (line, [time, prompt, output]) of every request."""
    first = next(lines, None)
    if first is None:
        raise Damaged("it is empty")
    if first[1].startswith("{"):
        return _MOONCAKE, _json_rows(chain([first], lines))
    number, header = first
    names = columns(number, header)
    shape = max((_AZURE, _BURSTGPT), key=lambda known: len({*known.columns} & {*names}))
    missing = [name for name in shape.columns if name not in names]
    if len(missing) == len(shape.columns):
        raise Damaged(
            f"line {number}: no trace format has the header {header[:80]!r}; known are CSV of Azure LLM inference "
            "(TIMESTAMP, ...) and BurstGPT (Timestamp, ...), and JSON lines of Mooncake"
        )
    if missing:
        raise Damaged(f"line {number}: the header lacks {', '.join(missing)}, which a trace of {shape.name} has")
    return shape, ((at, [row[name] for name in shape.columns]) for at, row in records(lines, names))


def _json_rows(lines: Lines) -> Iterator[tuple[int, list[Any]]]:
    for number, line in lines:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise Damaged(f"line {number}: it is no complete JSON") from error
        missing = [name for name in _MOONCAKE.columns if not isinstance(row, dict) or name not in row]
        if missing:
            raise Damaged(f"line {number}: it lacks {', '.join(missing)}, which a line of {_MOONCAKE.name} has")
        yield number, [row[name] for name in _MOONCAKE.columns]


def _parsed(number: int, shape: _Format, row: list[Any]) -> tuple[float, int, int]:
    """Seconds, prompt and output tokens of a row."""
    numbers = []
    for name, value, convert in zip(shape.columns, row, (shape.seconds, _number, _number), strict=True):
        try:
            numbers.append(convert(value))
        except (ValueError, TypeError, OverflowError) as error:
            kind = "time" if convert is _clock else "number"
            raise Damaged(f"line {number}: {name} is {shown(value)}, no {kind}") from error
    for name, tokens in zip(shape.columns[1:], numbers[1:], strict=True):
        if not 0 <= tokens <= _MOST_TOKENS or tokens != int(tokens):
            raise Damaged(f"line {number}: {name} is {tokens:g}, it must be a whole number from 0 on")
    return numbers[0], int(numbers[1]), int(numbers[2])
