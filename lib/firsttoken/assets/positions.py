"""How many tokens of a request a model turns by rotary angles that hang on each token's own position, and on no more.

Of transformers' rotary kinds two choose their angles by the longest position of the whole forward pass: "longrope"
takes long factors instead of short ones beyond the length that the model was trained with, "dynamic" raises its base.
Beyond that length a request's keys would be turned by one rule or another as its neighbours in the step, and the pieces
of its prompt, have it. Up to that length both are fixed, and equal to what transformers computes for the request alone:
so this is as far as such a model is run, by whatever runs it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import Damaged, blaming, shown

FIXED = ("default", "linear", "yarn", "llama3", "proportional")
BY_LENGTH = ("dynamic", "longrope")
CONTEXTS = {"llama": 2048, "qwen2": 32_768, "mistral": 131_072}
"""The max_position_embeddings that transformers' classes have where config.json leaves it out, by model_type."""

_KEY = "max_position_embeddings"


def context_of(config: Any) -> int:
    """The most tokens of a request, prompt and answer, of a model of transformers' ``config``.

    Raises ModelError as :func:`read_context`.
    """
    with _of(config) as content:
        return read_context(content)


def kinds_by_length(config: Any) -> list[str]:
    """The rotary kinds of transformers' ``config`` whose angles hang on the length of a pass, most often none.

    Raises ModelError as :func:`context_of`.
    """
    with _of(config) as content:
        return check_kinds(content)


@contextmanager
def _of(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of positions in transformers' ``config``; a fault of theirs in the block is a ModelError."""
    names = (_KEY, "original_max_position_embeddings", "rope_parameters")
    try:
        yield {name: value for name in names if (value := getattr(config, name, None)) is not None}
    except Damaged as damage:
        raise ModelError(f"the {config.model_type} model has {damage}") from None


def read_context(content: Mapping[str, Any]) -> int:
    """Return the most tokens of a request for the ``content`` of a config.json, under the names of transformers 5 or of
    those before it.

    Raises Damaged for a rotary kind that is unknown, and for lengths that are no whole numbers above 0.
    """
    most = _most(content)
    return min(_bound(settings, content, most) for settings in _told(content))


def check_kinds(content: Mapping[str, Any]) -> list[str]:
    """The kinds of ``content`` whose angles hang on the length. Raises Damaged for a kind that is unknown."""
    return [kind for kind in map(_kind, _told(content)) if kind in BY_LENGTH]


@contextmanager
def _file(folder: Path) -> Iterator[dict[str, Any]]:
    """The content of the config.json in ``folder``; what is wrong with it inside the block is a ModelError."""
    path = folder / "config.json"
    with blaming(path, ModelError, "copy the model's own"):
        yield read_json(path, 1 << 24)


def context_in(folder: Path) -> int:
    """The most tokens of a request of the model in ``folder``.

    Raises ModelError for a config.json that cannot be read, as :func:`read_context`.
    """
    with _file(folder) as content:
        return read_context(content)


def shortened(folder: Path) -> str:
    """Return the notice that the model in ``folder`` is run with less than its context; most often "".

    Raises ModelError for a config.json that cannot be read.
    """
    with _file(folder) as content:
        if not (kinds := check_kinds(content)) or (context := read_context(content)) == (most := _most(content)):
            return ""
        return (
            f"{folder.name} is run with {context} of its {most} tokens of context: beyond, its {kinds[0]} angles would "
            "hang on what else is in a step"
        )


def _bound(rope: Mapping[str, Any], content: Mapping[str, Any], most: int) -> int:
    """The most tokens up to which the rotation that ``rope`` describes is fixed."""
    if _kind(rope) != "longrope":
        return most
    name = "original_max_position_embeddings"
    # what stands beside the rotary parameters goes first, as in transformers
    sources = [source for source in (content, rope) if source.get(name) is not None]
    return min(most, _length(sources[0], name)) if sources else most


def _most(content: Mapping[str, Any]) -> int:
    kind = content.get("model_type")
    if content.get(_KEY) is None and kind in CONTEXTS:
        return CONTEXTS[kind]
    return _length(content, _KEY)


def _told(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rotary parameters that ``content`` names: one set of them, or one for each type of layers."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise Damaged(f"rotary parameters that should be a mapping and are {shown(rope)}")
    return [settings for settings in rope.values() if isinstance(settings, Mapping)] or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in FIXED + BY_LENGTH:
        kinds = ", ".join(FIXED + BY_LENGTH)
        raise Damaged(f"rotary positions of the kind {shown(kind)}, which cannot be computed here; known: {kinds}")
    return kind


def _length(content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if type(value) is not int or value < 1:
        raise Damaged(f"{name}: expected a whole number above 0, not {shown(value)}")
    return value
