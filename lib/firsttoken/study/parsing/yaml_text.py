"""YAML as data and no more: the core schema of YAML 1.2, keys that are there once, no aliases and no tags.
A key is text, or a whole number as it is spelt.

YAML 1.1, which PyYAML reads, makes dates of numbers, yes and no of words, and text of 1e-4.
"""

import math
import re
from collections.abc import Container
from copy import deepcopy
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import yaml

from firsttoken.study.parsing.parse_errors import ParseError, read_bytes, shown

_MOST_BYTES, _DEEPEST, _DIGITS = 1 << 24, 32, 20
_PART = re.compile(r"^\w+:(?=\s)", re.MULTILINE)
_TAG = "tag:yaml.org,2002:"


def read_yaml(path: Path) -> Any:
    """Read the YAML of a file, for the caller to change. Raises OSError, and ValueErrors as :func:`parse_yaml`."""
    return deepcopy(_content(read_bytes(path, _MOST_BYTES)))


def parse_yaml(text: bytes | str) -> Any:
    """Parse a UTF-8 text. Raises ParseError, naming the line, for anything that is not in this module's heading."""
    return _parsed(text, lambda loader: loader.get_single_data())


def read_parts(path: Path, keys: Container[str]) -> dict[str, Any]:
    """Read what a file's mapping holds under those of its keys that are among ``keys``, for the caller to change; all
    other parts are left unparsed. Each part begins with a line "KEY:". Raises as :func:`read_yaml`."""
    text = read_bytes(path, _MOST_BYTES).decode("utf-8")
    starts, parts = [match.start() for match in _PART.finditer(text)], dict[str, Any]()
    if parse_yaml(text[: starts[0] if starts else None]) is not None:
        raise ParseError("expected a mapping")
    for start, end in pairwise([*starts, len(text)]):
        key, line = text[start:].partition(":")[0], text.count("\n", 0, start)
        if key in parts:
            raise ParseError(f"line {line + 1}: the key {shown(key)} is there twice")
        parts[key] = deepcopy(_content("\n" * line + text[start:end]))[key] if key in keys else None
    return {key: part for key, part in parts.items() if key in keys}


# a process asks for the same profile, assets and claims again and again, and each takes tenths of a second
_content = lru_cache(maxsize=256)(parse_yaml)


def read_entries(path: Path) -> list[tuple[int, Any]]:
    """The line, from 1, and the content of each entry of a file that is one list; the same objects as long as it holds
    the same. Raises as :func:`read_yaml`."""
    return _entries(read_bytes(path, _MOST_BYTES))


@lru_cache(maxsize=4)
def _entries(text: bytes) -> list[tuple[int, Any]]:
    def entries(loader: _Loader) -> list[tuple[int, Any]]:
        root = loader.get_single_node()
        if not isinstance(root, yaml.SequenceNode):
            raise ParseError("expected a list")
        return [(node.start_mark.line + 1, loader.construct_document(node)) for node in root.value]

    return _parsed(text, entries)


def _parsed(text: bytes | str, take: Any) -> Any:
    loader = None
    try:
        loader = _Loader(text.decode("utf-8") if isinstance(text, bytes) else text)
        return take(loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"line {mark.line + 1}: " if mark else ""
        raise ParseError(f"{location}it is no YAML ({error.problem or error.context})") from error
    except yaml.YAMLError as error:
        raise ParseError(f"it is no YAML ({error})") from error
    finally:
        if loader:
            loader.dispose()


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}
    _depth = 0

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        # looks up to 1,024 characters ahead, and at each bracket at all that are open: 0.25 s of CPU for 1,000
        if self.flow_level >= _DEEPEST:
            raise ParseError(f"line {self.line + 1}: it is more than {_DEEPEST} levels deep")
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _fault_at(event, "anchors and aliases are not read; write the value out")
        if getattr(event, "tag", None) not in (None, "!"):
            raise _fault_at(event, f"tags such as {shown(event.tag)} are not read")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _fault_at(event, f"it is more than {_DEEPEST} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def mapping(self, node: Any) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if type(key) is int:  # a table by number, such as `1: ...`, has its keys as they are spelt
                key = key_node.value
            if not isinstance(key, str):
                raise _fault_at(key_node, f"the key {shown(key)} is no text; put it in quotes")
            if key in content:
                raise _fault_at(key_node, f"the key {shown(key)} is there twice")
            content[key] = self.construct_object(value_node, deep=True)
        return content

    def sequence(self, node: Any) -> list[Any]:
        return [self.construct_object(item, deep=True) for item in node.value]

    def text(self, node: Any) -> str:
        node.value.encode("utf-8")  # an escape may make half a surrogate pair
        return node.value

    def whole(self, node: Any) -> int:
        if len(node.value) > _DIGITS:
            raise _fault_at(node, f"the number {node.value[:_DIGITS]}... has {len(node.value)} digits")
        return int(node.value)

    def real(self, node: Any) -> float:
        number = float(node.value.replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(number):
            raise _fault_at(node, f"{node.value[:_DIGITS]} is no finite number")
        return number


def _fault_at(event: Any, fault: str) -> ParseError:
    return ParseError(f"line {event.start_mark.line + 1}: {fault}")


_SCALARS = (  # kind, spelling, first letters, value
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda loader, node: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda loader, node: node.value.lower() == "true"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789"), _Loader.whole),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
        _Loader.real,
    ),
    ("str", r"(?!)", [], _Loader.text),
)
for _kind, _spelling, _letters, _construct in _SCALARS:
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_spelling})$"), _letters)
    _Loader.add_constructor(_TAG + _kind, _construct)
_Loader.add_constructor(_TAG + "map", _Loader.mapping)
_Loader.add_constructor(_TAG + "seq", _Loader.sequence)
