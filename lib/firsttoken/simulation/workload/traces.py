"""Arrival traces as their authors publish them: Azure, BurstGPT, vidur, Alibaba Bailian and Mooncake.

A format is known by fields that no other has, and the unit of its times with it. Where that leaves a doubt, the reader
asks: a trace in seconds that is read as milliseconds is a load a thousand times too high.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from firsttoken.engine.workload_items import Item
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError
from firsttoken.study.parsing.csv_text import Lines, columns, numbered, plain_number, records
from firsttoken.study.parsing.json_text import parse_json, read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, regular_size, shown

_MOST = 1e15  # a time in ms; tokens have a limit of their own
_MOST_TOKENS = 10**8
_OWN = 1 << 61  # token ids from here on are those that no hash covers
_WEEK_S, _YEAR_S = 7 * 86_400.0, 366 * 86_400.0
UNITS = {"s": 1.0, "ms": 1e-3}


@dataclass(frozen=True)
class RequestTrace:
    """A trace as read, its times in ``unit``; ``dropped`` requests had no prompt or no answer (BurstGPT: failures).

    ``hashes`` are those of each prompt's blocks of ``block_tokens``, where the trace says which were there before.
    """

    format: str
    items: tuple[Item, ...]
    dropped: int
    unit: str
    hashes: tuple[tuple[int, ...], ...] = ()
    block_tokens: int = 0

    def prompt(self, index: int) -> tuple[int, ...]:
        """Token ids of request ``index``: two prompts begin alike as far as their ``hashes`` do, and what no hash
        covers is their own."""
        length = self.items[index].prompt_tokens
        if not self.hashes:
            return (0,) * length
        hashed = [number for number in self.hashes[index] for _ in range(self.block_tokens)][:length]
        return (*hashed, *(_OWN + index,) * (length - len(hashed)))

    def up_to(self, tokens: int) -> RequestTrace:
        """The trace without requests of more than ``tokens``."""
        fitting = [index for index, item in enumerate(self.items) if item.total_tokens <= tokens]
        hashes = tuple(self.hashes[index] for index in fitting) if self.hashes else ()
        return replace(self, items=tuple(self.items[index] for index in fitting), hashes=hashes)

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return self.items[-1].arrival_s

    def description(self) -> str:
        """Describe what was read on one line: the format, the unit of its times, how many requests, over how long."""
        times = "clock times" if self.unit == "clock" else f"times in {self.unit}"
        omitted = f" ({self.dropped} without a prompt or an answer left out)" if self.dropped else ""
        alike = "; prompts that begin alike share blocks of the cache" if self.hashes else ""
        requests = f"{len(self.items):,} requests{omitted}"
        return f"a trace of {self.format}, {times}: {requests} over {self.span_s:,.6g} s{alike}"


@dataclass(frozen=True)
class _Format:
    """The columns (or JSON fields) of a published trace, and what its times can be.

    ``own`` fields are those by which it is known, beside the three that are read. A trace that is longer than
    ``longest_s``, or has more than ``most_per_s`` requests a second, is none of it: the published ones are far from
    both.
    """

    name: str
    time: str
    prompt: str
    output: str
    unit: str
    number: Callable[[Any], float]
    own: tuple[str, ...] = ()
    longest_s: float = _YEAR_S
    most_per_s: float = 1e4
    block_tokens: int = 0  # of each of a request's hash_ids

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = plain_number(value) if isinstance(value, str) else float(value)
    if not abs(number) <= _MOST:
        raise ValueError
    return number


def _since(value: Any) -> float:
    if (number := _number(value)) < 0:
        raise ValueError
    return number


def _clock(value: Any) -> float:
    """Seconds of "2023-11-16 18:15:46.6805900" (2023) or "2024-05-10 00:00:00.009930+00:00" (2024)."""
    moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_AZURE = _Format("Azure LLM inference", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "clock", _clock)
# release 2.0 has two more columns (Session ID, Elapsed time): columns are found by name
_BURSTGPT = _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", "s", _since)
_JSON = ("timestamp", "input_length", "output_length")
_VIDUR = _Format("vidur or Sarathi-Serve", "arrived_at", "num_prefill_tokens", "num_decode_tokens", "s", _since)
# two hours, 6 to 12 requests a second
_BAILIAN = _Format("Alibaba Bailian", *_JSON, "s", _since, ("chat_id", "parent_chat_id", "turn"), _WEEK_S, 1e3, 16)
# an hour, 3 to 7 requests a second; whole milliseconds
_MOONCAKE = _Format("Mooncake", *_JSON, "ms", _since, ("hash_ids",), _WEEK_S, 50.0, 512)
_UNNAMED = _Format("no published format", *_JSON, "", _since)


def load_trace(path: str | Path, unit: str | None = None) -> RequestTrace:
    """Read a trace file; what it is, it says itself. Its items, the requests that have a prompt and an answer, are a
    workload without token ids.

    ``unit`` is that of its times, "s" or "ms", for files that do not say it or say it wrongly. Times of the items are
    seconds since the first request, to the microsecond; items are sorted by them. Raises CorpusError naming file,
    line and mend for a file that cannot be read, is empty, not UTF-8 or of another format, for a torn line, for a value
    that is no number or negative, and for times whose unit is in doubt.
    """
    path = paths.expanded(path)
    if unit not in (None, *UNITS):
        raise CorpusError(f"{path.name}: times are in {' or '.join(UNITS)}, not in {unit!r}")
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    dropped = 0
    with errors_as(path, CorpusError, "mend the line, or download the file again"), closing(numbered(path)) as lines:
        shape, values = _json_rows(_json_list(path)) if _is_list(path) else _opened(lines)
        for location, row in values:
            time, prompt, output = _parsed(location, shape, row[:3])
            if prompt and output:
                rows.append((time, prompt, output, _hashes(location, shape, row[3:])))
            else:
                dropped += 1
    if not rows:
        raise CorpusError(f"{path} has no request with a prompt and an answer ({dropped} without); use another file")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    if unit is None:
        if doubt := _doubt(shape, [time for time, *_ in rows]):
            raise CorpusError(f"{path}: {doubt}; are they seconds or milliseconds? say unit s or ms (--arrivals-unit)")
        unit = shape.unit
    elif shape.unit == "clock":
        raise CorpusError(f"{path}: times of {shape.name} are clock times and have no unit; leave it out")
    second = UNITS.get(unit, 1.0)
    items = tuple(Item(round((time - start) * second, 6), prompt, output) for time, prompt, output, _ in rows)
    hashes = tuple(row[3] for row in rows) if any(row[3] for row in rows) else ()
    return RequestTrace(shape.name, items, dropped, unit, hashes, shape.block_tokens)


def _doubt(shape: _Format, times: list[float]) -> str | None:
    """Why ``times``, ascending, may be of another unit than the format's; None where nothing speaks for that."""
    if not shape.unit:
        named = "; ".join(
            f"{trace_format.name} has {', '.join(trace_format.own)}" for trace_format in (_BAILIAN, _MOONCAKE)
        )
        return f"its times have no unit, as it is of no published format ({named})"
    span_s = (times[-1] - times[0]) * UNITS.get(shape.unit, 1.0)
    read = f"read as {shape.name}, whose times are in {shape.unit},"
    if (
        shape.unit == "ms"
        and (fractional_time := next((time for time in times if time != int(time)), None)) is not None
    ):
        return f"{read} it has a time of {fractional_time:g}, and {shape.name} has whole ones"
    if span_s > shape.longest_s:
        return f"{read} it would be {span_s / 86_400:,.0f} days long"
    if span_s and len(times) / span_s > shape.most_per_s:
        return f"{read} its {len(times):,} requests would come within {span_s:g} s"
    return None


def _opened(lines: Lines) -> tuple[_Format, Iterator[tuple[str, list[Any]]]]:
    """The format, and (place in the file, [time, prompt, output]) of every request."""
    first = next(lines, None)
    if first is None:
        raise ParseError("it is empty")
    if first[1].startswith("{"):
        return _json_rows(_json_objects(chain([first], lines)))
    number, header = first
    names = columns(number, header)
    shape = max((_AZURE, _BURSTGPT, _VIDUR), key=lambda candidate: len({*candidate.columns} & {*names}))
    missing = [name for name in shape.columns if name not in names]
    if len(missing) == len(shape.columns):
        raise ParseError(
            f"line {number}: no trace format has the header {header[:80]!r}; known are CSV of Azure LLM inference "
            "(TIMESTAMP, ...), BurstGPT (Timestamp, ...) and vidur (arrived_at, ...), and JSON lines of Alibaba "
            "Bailian and Mooncake"
        )
    if missing:
        raise ParseError(f"line {number}: the header lacks {', '.join(missing)}, which a trace of {shape.name} has")
    return shape, ((f"line {line}", [row[name] for name in shape.columns]) for line, row in records(lines, names))


def _json_rows(requests: Iterator[tuple[str, dict[str, Any]]]) -> tuple[_Format, Iterator[tuple[str, list[Any]]]]:
    """The format of the first request, and (place, [time, prompt, output]) of every one; all must be of that format."""
    first = next(requests)
    shape = _json_format(first[1])

    def values() -> Iterator[tuple[str, list[Any]]]:
        for location, row in chain([first], requests):
            missing = [name for name in (*shape.columns, *shape.own) if name not in row]
            if missing:
                raise ParseError(f"{location}: it lacks {', '.join(missing)}, which a line of {shape.name} has")
            if (other := _json_format(row)) is not shape:
                raise ParseError(f"{location}: it is a line of {other.name}, and those before are of {shape.name}")
            yield location, [row[name] for name in shape.columns] + ([row["hash_ids"]] if "hash_ids" in row else [])

    return shape, values()


def _json_objects(lines: Lines) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in lines:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ParseError(f"line {number}: it is no complete JSON") from error
        yield f"line {number}", row if isinstance(row, dict) else {}


def _is_list(path: Path) -> bool:
    """Return whether the file is one JSON list, on one line or on many."""
    regular_size(path)
    with path.open("rb") as file:
        return file.read(64).removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def _json_list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = read_json(path)
    if not rows:
        raise ParseError("it is an empty list")
    for number, row in enumerate(rows, 1):
        yield f"entry {number}", row if isinstance(row, dict) else {}


def _json_format(row: dict[str, Any]) -> _Format:
    """Bailian's lines also have the field by which Mooncake's are known."""
    return next((shape for shape in (_BAILIAN, _MOONCAKE) if any(name in row for name in shape.own)), _UNNAMED)


def _hashes(location: str, shape: _Format, rest: list[Any]) -> tuple[int, ...]:
    """The hashes of a request's blocks; none where its line has none. Raises ParseError for other things."""
    if not rest or not shape.block_tokens:
        return ()
    if not isinstance(rest[0], list) or any(type(number) is not int or not 0 <= number < _OWN for number in rest[0]):
        raise ParseError(f"{location}: hash_ids is {shown(rest[0])}, no list of whole numbers from 0 to 2**61")
    return tuple(rest[0])


def _parsed(location: str, shape: _Format, row: list[Any]) -> tuple[float, int, int]:
    """Seconds, prompt and output tokens of a row."""
    numbers = []
    for name, value, convert in zip(shape.columns, row, (shape.number, _number, _number), strict=True):
        try:
            numbers.append(convert(value))
        except (ValueError, TypeError, OverflowError) as error:
            kind = "time" if convert is _clock else "number"
            raise ParseError(f"{location}: {name} is {shown(value)}, no {kind}") from error
    for name, tokens in zip(shape.columns[1:], numbers[1:], strict=True):
        if not 0 <= tokens <= _MOST_TOKENS or tokens != int(tokens):
            raise ParseError(f"{location}: {name} is {tokens:g}, it must be a whole number from 0 on")
    return numbers[0], int(numbers[1]), int(numbers[2])
