"""What clients may say of settings that are not served here: what is done anyway.

The fields are those of OpenAI's two interfaces, vLLM, SGLang, Text Generation Inference, llama.cpp, LMDeploy, Ollama
and the services that speak OpenAI's language. A null is the same as a field that is left out, and so stands nowhere.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from firsttoken.study.errors import RequestError

Values = tuple[Any, ...]
Table = dict[str, Values]


def _table(name: str) -> Table:
    """The values of each field in the rows ``name`` of ``neutral.toml``."""
    return {field: tuple(row.get("values", ())) for row in _ROWS[name] for field in row["fields"].split()}


_ROWS = tomllib.loads((Path(__file__).parent / "neutral.toml").read_text(encoding="utf-8"))
REQUEST, DRAWS, COMPLETION, CHAT, MESSAGE = map(_table, ("request", "draws", "completion", "chat", "message"))
OF_THE_CLIENT, OF_AN_ANSWER = _table("of_the_client").keys(), _table("of_an_answer").keys()


def request_table(content: dict[str, Any], fields: Table) -> Table:
    """Return the values that a request's fields may have, where they depend on its other fields, too; ``fields`` are
    those of its kind."""
    greedy = same(content.get("temperature"), 0)
    hanging = {"best_of": (1, content.get("n", 1)), "do_sample": (not greedy,)}
    numbers = {field: (content[field],) for field in DRAWS if greedy and type(content.get(field)) in (int, float)}
    return REQUEST | DRAWS | hanging | numbers | fields


def drop_neutral(content: dict[str, Any], table: Table, passed: Collection[str], prefix: str = "") -> None:
    """Take out of an object of a body what only says what is done anyway, and what is ``passed`` over.

    Raises RequestError where a field of ``table`` says something else; ``prefix`` stands before its name. What is in
    neither is left there.
    """
    for field in [field for field in content if field in passed or field in table]:
        content_value = content.pop(field)
        if field not in passed and not any(same(content_value, value) for value in table[field]):
            only = " or ".join(dict.fromkeys(map(json.dumps, table[field])))
            reason = f"only {only} is served" if only else "it is not served"
            raise RequestError(f"{prefix}{field}: {reason}; leave it out")


def same(value: Any, other: Any) -> bool:
    """Return whether two values of JSON are the same: 1 and 1.0 are, and true is no number."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def without_nulls(value: Any) -> Any:
    """A body without the fields that are null, at any depth: they mean the same as fields that are left out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
