"""The content of a result as text: canonical for its hash, a line a row for its file, numbers that are finite."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def sha256_of(content: Mapping[str, Any]) -> str:
    """The hash of ``content``, whatever the order of its keys and the layout of its file."""
    text = json.dumps(content, sort_keys=True, default=_plain, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def dump(content: Mapping[str, Any]) -> str:
    """JSON with a line per row and per entry of the summary, so that a changed observation is one changed line."""

    def encode(value: Any, **layout: Any) -> str:
        return json.dumps(value, sort_keys=True, allow_nan=False, default=_plain, ensure_ascii=False, **layout)

    parts = []
    for key, value in sorted(content.items()):
        if key in ("rows", "summary") and value:
            text = "[\n" + ",\n".join(encode(item, separators=(",", ":")) for item in value) + "\n ]"
        else:
            text = encode(value, indent=1).replace("\n", "\n ")
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as a Python number."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be kept in a result")


def not_finite(value: Any, place: str = "") -> Iterable[str]:
    """Places of the nan and infinite numbers in ``value``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from not_finite(item, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from not_finite(item, f"{place}[{index}]")
    elif getattr(value, "ndim", None) == 0:
        yield from not_finite(value.item(), place)
    elif isinstance(value, float) and not math.isfinite(value):
        yield place
