"""The content of a result as text: canonical for its hash, a line for each row in its file, numbers that are finite."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def sha256_of(content: Mapping[str, Any]) -> str:
    """The hash of ``content``, whatever the order of its keys and the layout of its file."""
    text = json.dumps(content, sort_keys=True, default=_plain, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def line(content: Any) -> str:
    """Return ``content`` as one line of ASCII with its keys in order, for programs. Raises ValueError for nan."""
    return json.dumps(content, sort_keys=True, allow_nan=False, default=_plain)


MANY = 500  # rows, whose names are written once


def dump(content: Mapping[str, Any]) -> str:
    """JSON with a line per row and per entry of the summary, so that a changed observation is one changed line.

    Of many rows ``keys`` has the names, each set of them once, and a row is a list: which of ``keys`` it has, and its
    values in that order. :func:`expanded` gives the rows back.
    """
    if len(rows := content.get("rows") or ()) > MANY:
        content = dict(content) | _with_keys_apart(rows)

    def encode(value: Any, **layout: Any) -> str:
        return json.dumps(value, sort_keys=True, allow_nan=False, default=_plain, ensure_ascii=False, **layout)

    parts = []
    for key, value in sorted(content.items()):
        if key in ("keys", "rows", "summary") and value:
            text = "[\n" + ",\n".join(encode(item, separators=(",", ":")) for item in value) + "\n ]"
        else:
            text = encode(value, indent=1).replace("\n", "\n ")
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _with_keys_apart(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    numbers: dict[tuple[str, ...], int] = {}
    lists = []
    for row in rows:
        keys = tuple(sorted(row))
        lists.append([numbers.setdefault(keys, len(numbers)), *(row[key] for key in keys)])
    return {"keys": [list(keys) for keys in numbers], "rows": lists}


def expanded(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` of a file with each row by its keys, however they were written.

    Raises ValueError for rows that do not fit the keys."""
    if "keys" not in content:
        return dict(content)
    content = dict(content)
    keys, rows = content.pop("keys"), content.get("rows")
    if not (isinstance(keys, list) and isinstance(rows, list)):
        raise ValueError("its rows and their keys are no lists")
    try:
        content["rows"] = [dict(zip(keys[number], values, strict=True)) for number, *values in rows]
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError("a row does not fit its keys") from error
    return content


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as a Python number."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be kept in a result")


def not_finite(value: Any, path: str = "") -> Iterable[str]:
    """Places of the nan and infinite numbers in ``value``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from not_finite(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from not_finite(item, f"{path}[{index}]")
    elif getattr(value, "ndim", None) == 0:
        yield from not_finite(value.item(), path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path
