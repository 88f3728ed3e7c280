"""JSON within limits (standard library only): no key twice, no number that is none, nothing too deep or too long."""

import codecs
import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from firsttoken.study.parsing.parse_errors import MOST_BYTES, ParseError, read_bytes, shown

DEEPEST = 64
_DIGITS = 20  # of a whole number: 64 bits and a sign
# what only a look at each number tells, which takes ten times as long: 21 digits, or an exponent of 3; that it begins
# with what it looks for makes the search of running text ten times faster than `\d{21}|[eE]\+?\d{3}`
_EXTREME = re.compile(r"\d{3}(?:(?<=[eE]\d{3})|(?<=[eE]\+\d{3})|\d{18})", re.ASCII)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Read the JSON of a file. Raises OSError, and ParseError and other ValueErrors as :func:`parse_json`."""
    return parse_json(read_bytes(path, most))


def parse_json(text: bytes | str, digits: int = _DIGITS) -> Any:
    """Parse a UTF-8 text; a byte order mark before it is none of it.

    Raises ParseError, or another ValueError, for what is no JSON: a key that is there twice, nan and infinite numbers,
    whole ones of more than ``digits`` digits, brackets more than 64 deep, half a surrogate pair.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    text = text.removeprefix("\ufeff")
    numbers = {"parse_int": partial(_integer, digits), "parse_float": _finite} if _EXTREME.search(text) else {}
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, **numbers)
    except json.JSONDecodeError as error:
        raise ParseError(f"it is truncated or no JSON (line {error.lineno}: {error.msg})") from error
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def json_lines(text: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number, from 1, and value of each line that is not empty. Raises ParseError, which names the line."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.removeprefix(codecs.BOM_UTF8).strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            raise ParseError(f"line {number}: it is torn or no JSON ({error})") from error
        yield number, value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ParseError(f"the key {shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return made


def _integer(digits: int, text: str) -> int:
    if len(text) > digits:
        raise ParseError(f"the number {text[:_DIGITS]}... has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ParseError(f"the number {text[:_DIGITS]} is too large")
    return number


def _constant(text: str) -> NoReturn:
    raise ParseError(f"{text} is no number")


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise _too_deep()


def _too_deep() -> ParseError:
    return ParseError(f"its brackets are more than {DEEPEST} deep")
