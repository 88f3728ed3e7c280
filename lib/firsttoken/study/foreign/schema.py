"""A dataclass as the schema of what a file holds (standard library only).

A schema library would say this in as many words, but a worker reads a manifest before its first byte moves, and the
import alone took 80 ms; and a bare GPU machine need not have one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from firsttoken.study.foreign.faults import Damaged, shown

Kind = TypeVar("Kind")
Fault = Callable[[Any], str]  # what is wrong with a value, "" if nothing: stands in `Annotated[int, at_least(0)]`


def at_least(least: float) -> Fault:
    """A number of ``least`` or more."""
    return lambda value: "" if value >= least else f"expected {least} or more"


def between(least: float, most: float) -> Fault:
    """A number within both ends."""
    return lambda value: "" if least <= value <= most else f"expected {least:,} to {most:,}"


def digits(count: int) -> Fault:
    """A text of so many lower-case hexadecimal digits."""
    return lambda value: (
        "" if len(value) == count and set(value) <= set("0123456789abcdef") else f"expected {count} hex"
    )


def plain_name(value: str) -> str:
    """The name of a file in a folder that is known, and of no other."""
    return "" if re.fullmatch(r"[\w-][\w.+-]{0,200}", value) else "expected the name of a file, without a folder"


def some(value: Sized) -> str:
    """At least one."""
    return "" if len(value) else "expected at least one"


def shaped(kind: type[Kind], value: Any, place: str = "", *, others: bool = False) -> Kind:
    """``value``, as JSON or YAML gives it, as ``kind``: dataclasses, tuples, dicts, unions, literals and plain types.

    Lists become tuples and whole numbers floats; nothing else is converted. ``others``: keys that no field has are
    passed over, as in a file of another project, of which a part is used. Raises Damaged, naming the place, for an
    unknown key, a missing one, and a value of another type or out of its range.
    """
    return _shaped(kind, value, place, others)


def unknown(name: Any, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: what exists, and what was probably meant."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name), names, n=1)
    return f"known: {', '.join(names) or 'none'}" + (f" (did you mean {nearest[0]!r}?)" if nearest else "")


def _shaped(hint: Any, value: Any, place: str, others: bool) -> Any:
    if type(value) is hint and hint is not float:  # exactly: True is no number
        return value
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if origin is None:
        if is_dataclass(hint) and isinstance(value, Mapping):
            return _built(hint, value, place, others)
        if hint is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        raise _expected(hint, value, place)
    inner = typing.get_args(hint)
    if origin is typing.Annotated:
        made = _shaped(inner[0], value, place, others)
        if fault := next((fault for check in inner[1:] if (fault := check(made))), ""):
            raise Damaged(f"{_of(place)}{fault}, not {shown(value)}")
        return made
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        options = [option for option in inner if option is not types.NoneType]
        if len(options) == 1:
            return _shaped(options[0], value, place, others)
        for option in sorted(options, key=lambda option: type(value) is not option):
            with suppress(Damaged):
                return _shaped(option, value, place, others)
    elif origin is Literal:
        if any(type(value) is type(known) and value == known for known in inner):
            return value
        raise Damaged(f"{_of(place)}{shown(value)} is not known; {unknown(value, map(str, inner))}")
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(_shaped(item_kind, item, f"{place}[{i}]", others) for i, (item, item_kind) in pairs)
    elif origin is list and isinstance(value, list):
        return [_shaped(inner[0], item, f"{place}[{i}]", others) for i, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {key: _shaped(inner[1], item, f"{place}[{shown(key)}]", others) for key, item in value.items()}
    raise _expected(hint, value, place)


def _built(kind: type, values: Mapping[str, Any], place: str, others: bool) -> Any:
    fields, required = _fields(kind)
    made = {}
    for key, value in values.items():
        if key in fields:
            made[key] = _shaped(fields[key], value, f"{place}.{key}" if place else key, others)
        elif not others:
            raise Damaged(f"{_of(place)}unknown key {shown(key)}; {unknown(key, fields)}")
    if absent := next((key for key in required if key not in made), ""):
        raise Damaged(f"{_of(place)}missing key {absent!r}")
    try:
        return kind(**made)
    except Damaged as error:
        raise Damaged(f"{_of(place)}{error}") from error


@cache
def _fields(kind: type) -> tuple[dict[str, Any], list[str]]:
    """The types of a dataclass's fields, and the names of those that have no default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [entry for entry in dataclasses.fields(kind) if entry.init]
    missing = dataclasses.MISSING
    required = [entry.name for entry in fields if entry.default is missing and entry.default_factory is missing]
    return {entry.name: hints[entry.name] for entry in fields}, required


def _of(place: str) -> str:
    return f"{place}: " if place else ""


def _expected(hint: Any, value: Any, place: str) -> Damaged:
    name = "a mapping" if is_dataclass(hint) else getattr(hint, "__name__", None) if isinstance(hint, type) else None
    return Damaged(f"{_of(place)}expected {name or str(hint).replace('typing.', '')}, not {shown(value)}")
