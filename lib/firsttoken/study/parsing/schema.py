"""A dataclass as the schema of what a file holds (standard library only).

A schema library would say this in as many words, but a worker reads a manifest before its first byte moves, and the
import of pydantic alone took 80 ms; and a bare GPU machine need not have one. msgspec is imported as fast as this, but
it passes over keys that a dataclass does not have (its issue 791), and its errors do not say which are known.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, partial
from itertools import count, repeat
from typing import Any, Literal, TypeVar

from firsttoken.study.parsing.parse_errors import ParseError, shown

Kind = TypeVar("Kind")
Fault = Callable[[Any], str]  # what is wrong with a value, "" if nothing: stands in `Annotated[int, at_least(0)]`


def fits(test: Callable[[Any], object], fault: str) -> Fault:
    """Return the check by ``test``; ``fault`` is what is wrong with a value for which it is false."""
    return lambda value: "" if test(value) else fault


def at_least(least: float) -> Fault:
    """A number of ``least`` or more."""
    return fits(lambda value: value >= least, f"expected {least} or more")


def between(least: float, most: float) -> Fault:
    """Return the check that a number is within both ends."""
    return fits(lambda value: least <= value <= most, f"expected {least:,} to {most:,}")


def digits(count: int) -> Fault:
    """A text of so many lower-case hexadecimal digits."""
    return fits(lambda value: len(value) == count and set(value) <= set("0123456789abcdef"), f"expected {count} hex")


def plain_name(value: str) -> str:
    """The name of a file in a folder that is known, and of no other."""
    return "" if re.fullmatch(r"[\w-][\w.+-]{0,200}", value) else "expected the name of a file, without a folder"


def non_empty(value: Sized) -> str:
    """Check that there is at least one; return what is wrong, or ""."""
    return "" if len(value) else "expected at least one"


def parse_as(kind: type[Kind], value: Any, path: str = "", *, others: bool = False) -> Kind:
    """``value``, as JSON or YAML gives it, as ``kind``: dataclasses, tuples, dicts, unions, literals and plain types.

    Lists become tuples and whole numbers floats; nothing else is converted. ``others``: keys that no field has are
    passed over, as in a file of another project, of which a part is used. Raises ParseError, naming the place, for an
    unknown key, a missing one, and a value of another type or out of its range.
    """
    try:
        return _reader(kind, others)(value)
    except _Fault as fault:
        location = (path + "".join(reversed(fault.path))).lstrip(".")
        raise ParseError(f"{location}: {fault}" if location else str(fault)) from fault


def unknown(name: Any, known_names: Iterable[str]) -> str:
    """The tail of an error about an unknown name: what exists, and what was probably meant."""
    names = sorted(known_names)
    nearest = difflib.get_close_matches(str(name)[:80], names, n=1)  # of a name of 10 MB it would take 0.6 s
    return f"known: {', '.join(names) or 'none'}" + (f" (did you mean {nearest[0]!r}?)" if nearest else "")


class _Fault(ValueError):
    """A fault of a value; its place is put together on the way out, so that a value without one costs nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


@cache
def _reader(hint: Any, others: bool) -> Callable[[Any], Any]:
    """Return the function that makes a value of the type ``hint``, or raises _Fault."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if is_dataclass(hint):
        return _dataclass_reader(hint, others)
    if origin is typing.Annotated:
        return partial(_checked, _reader(inner[0], others), inner[1:])
    if origin in (typing.Union, types.UnionType):
        readers = {option: _reader(option, others) for option in inner if option is not types.NoneType}
        return partial(_one_of, hint, readers, types.NoneType in inner)
    if origin is Literal:
        return partial(_literal, inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return partial(_row, hint, [_reader(kind, others) for kind in inner])
    if origin in (tuple, list):
        return partial(_sequence, hint, origin, _reader(inner[0], others))
    if origin is dict:
        return partial(_mapping, hint, _reader(inner[1], others))
    return _float if hint is float else partial(_plain, hint)


def _plain(kind: type, value: Any) -> Any:
    if type(value) is kind:  # exactly: True is no number
        return value
    raise _unlike(kind, value)


def _float(value: Any) -> float:
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    raise _unlike(float, value)


def _checked(read: Callable[[Any], Any], checks: Iterable[Fault], value: Any) -> Any:
    made = read(value)
    for check in checks:
        if fault := check(made):
            raise _Fault(f"{fault}, not {shown(value)}")
    return made


def _one_of(hint: Any, readers: Mapping[Any, Callable[[Any], Any]], optional: bool, value: Any) -> Any:
    if value is None and optional:
        return None
    if len(readers) == 1:
        return next(iter(readers.values()))(value)
    for option in sorted(readers, key=lambda option: type(value) is not option):
        with suppress(_Fault):
            return readers[option](value)
    raise _unlike(hint, value)


def _literal(literals: tuple[Any, ...], value: Any) -> Any:
    if any(type(value) is type(literal) and value == literal for literal in literals):
        return value
    raise _Fault(f"{shown(value)} is not known; {unknown(value, map(str, literals))}")


def _row(hint: Any, readers: list[Callable[[Any], Any]], value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != len(readers):
        raise _unlike(hint, value)
    return tuple(_read_each(readers, count(), value))


def _sequence(hint: Any, kind: type, read_one: Callable[[Any], Any], value: Any) -> Any:
    if not (isinstance(value, list) or (kind is tuple and isinstance(value, tuple))):
        raise _unlike(hint, value)
    return kind(_read_each(repeat(read_one), count(), value))


def _mapping(hint: Any, read_one: Callable[[Any], Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise _unlike(hint, value)
    return dict(zip(value, _read_each(repeat(read_one), value, value.values()), strict=True))


def _read_each(readers: Iterable[Callable[[Any], Any]], keys: Iterable[Any], values: Iterable[Any]) -> Iterator[Any]:
    for read, key, value in zip(readers, keys, values, strict=False):
        try:
            yield read(value)
        except _Fault as fault:
            fault.path.append(f"[{shown(key)}]")
            raise


def _dataclass_reader(kind: type, others: bool) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [entry for entry in dataclasses.fields(kind) if entry.init]
    readers = {entry.name: _reader(hints[entry.name], others) for entry in fields}
    missing = dataclasses.MISSING
    required = [entry.name for entry in fields if entry.default is missing and entry.default_factory is missing]

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Fault(f"expected a mapping, not {shown(value)}")
        made = {}
        for key, item in value.items():
            if (read_one := readers.get(key)) is not None:
                try:
                    made[key] = read_one(item)
                except _Fault as fault:
                    fault.path.append(f".{key}")
                    raise
            elif not others:
                raise _Fault(f"unknown key {shown(key)}; {unknown(key, readers)}")
        for key in required:
            if key not in made:
                raise _Fault(f"missing key {key!r}")
        try:
            return kind(**made)
        except ParseError as error:
            raise _Fault(str(error)) from error

    return read


def _unlike(hint: Any, value: Any) -> _Fault:
    name = hint.__name__ if type(hint) is type else str(hint).replace("typing.", "")
    return _Fault(f"expected {name}, not {shown(value)}")
