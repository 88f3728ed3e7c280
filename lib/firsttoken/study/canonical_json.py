"""Content as JSON for programs: canonical, so that its hash is one whatever the order of its keys."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def sha256_of(content: Mapping[str, Any]) -> str:
    """The hash of ``content``, whatever the order of its keys and the layout of its file."""
    text = json.dumps(content, sort_keys=True, default=plain_number, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def line(content: Any) -> str:
    """Return ``content`` as one line of ASCII with its keys in order, for programs. Raises ValueError for nan."""
    return json.dumps(content, sort_keys=True, allow_nan=False, default=plain_number)


def plain_number(value: Any) -> Any:
    """A numpy or torch scalar as a Python number."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be kept in a result")
