"""How many tokens of a request a model turns by rotary angles that hang on each token's own position, and on no more.

Of transformers' rotary kinds two choose their angles by the longest position of the whole forward pass: "longrope"
takes long factors instead of short ones beyond the length that the model was trained with, "dynamic" raises its base.
Beyond that length a request's keys would be turned by one rule or another as its neighbours in the step, and the pieces
of its prompt, have it. Up to that length both are fixed, and equal to what transformers computes for the request alone:
so this is as far as such a model is run, by whatever runs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.parse_errors import ParseError, shown
from firsttoken.study.parsing.schema import between, parse_as

FIXED = ("default", "linear", "yarn", "llama3", "proportional")
BY_LENGTH = ("dynamic", "longrope")
Length = Annotated[int, between(1, 1 << 40)]

_NAMES = ("rope_scaling", "rope_parameters")  # before transformers 5, and since
_Positive = Annotated[float, between(1e-12, 1e12)]
_TRAINED = ("llama3", "yarn", "longrope")  # which count from the length that the model was trained with
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


@dataclass(frozen=True)
class Rotary:
    """Parameters of rotary positions, under transformers' names; ``more`` are the names of those that are not here."""

    rope_type: str = "default"
    rope_theta: _Positive = 10_000.0
    factor: _Positive = 1.0
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    original_max_position_embeddings: Length | None = None
    more: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in FIXED + BY_LENGTH:
            kinds = ", ".join(FIXED + BY_LENGTH)
            raise ParseError(
                f"rotary positions of the kind {shown(self.rope_type)}, which cannot be computed here; known: {kinds}"
            )
        if self.rope_type == "llama3" and self.high_freq_factor == self.low_freq_factor:
            raise ParseError("high_freq_factor equals low_freq_factor")

    @property
    def fixed_tokens(self) -> int | None:
        """The number of tokens up to which the angles are fixed; None for as many as the model has."""
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None


def read_rotary(content: Mapping[str, Any]) -> tuple[Rotary, ...]:
    """The rotary parameters of a config.json's ``content``, under the names of transformers 5 or of those before it:
    one set of them, or one for each type of layers.

    Raises ParseError for a kind that is unknown, and for a value that no model has.
    """
    named = [rope for name in _NAMES if (rope := content.get(name))]
    if len(named) == 2 and named[0] != named[1]:
        raise ParseError(f"{_NAMES[0]} and {_NAMES[1]} differ")
    rope = named[0] if named else {}
    if not isinstance(rope, Mapping):
        raise ParseError(f"rope_parameters: expected a mapping, not {shown(rope)}")
    by_layers = [settings for settings in rope.values() if isinstance(settings, Mapping)]
    return tuple(_rotary(settings, content) for settings in by_layers or [rope])


def _rotary(settings: Mapping[str, Any], content: Mapping[str, Any]) -> Rotary:
    """The parameters in ``settings``, and those that stand beside them in ``content``."""
    values = {name: value for name, value in settings.items() if value is not None}
    kind = values.setdefault("rope_type", values.pop("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if content.get(name) is not None:
            values.setdefault(name, content[name])
    beside = content.get("original_max_position_embeddings")
    if kind in _TRAINED and beside is not None:  # as in transformers, it goes first
        values["original_max_position_embeddings"] = beside
    more = tuple(sorted(values.keys() - Rotary.__dataclass_fields__.keys()))
    rotary = parse_as(Rotary, values | {"more": more}, "rope_parameters", others=True)
    if missing := [name for name in _NEEDED.get(rotary.rope_type, ()) if name not in values]:
        raise ParseError(f"rope_parameters: missing key {missing[0]!r}")
    return rotary


def context_of(config: Any) -> int:
    """The most tokens of a request, prompt and answer, of a model of ``config``: transformers', or a ModelConfig.

    Raises ModelError for a length that is no whole number above 0, and as :func:`kinds_by_length`.
    """
    most = _longest(config)
    return min(most, *(rotary.fixed_tokens or most for rotary in _rotary_of(config)))


def kinds_by_length(config: Any) -> list[str]:
    """The rotary kinds of ``config`` whose angles hang on the length of a pass, most often none.

    Raises ModelError for rotary parameters that are unknown.
    """
    return [rotary.rope_type for rotary in _rotary_of(config) if rotary.rope_type in BY_LENGTH]


def shortened(config: Any, name: str) -> str:
    """Return the notice that the model ``name`` of ``config`` is run with less than its context; most often ""."""
    context, most = context_of(config), _longest(config)
    if context == most:
        return ""
    return (
        f"{name} is run with {context} of its {most} tokens of context: beyond, its {kinds_by_length(config)[0]} "
        "angles would hang on what else is in a step"
    )


def _longest(config: Any) -> int:
    name = "max_position_embeddings"
    try:
        return parse_as(Length, getattr(config, name, None), name)
    except ParseError as damage:
        raise ModelError(f"the {config.model_type} model has {damage}") from None


def _rotary_of(config: Any) -> tuple[Rotary, ...]:
    if isinstance(rotary := getattr(config, "rotary", None), tuple):  # of a ModelConfig; Falcon's class has a flag so
        return rotary
    names = ("original_max_position_embeddings", "rope_parameters")
    try:
        return read_rotary({name: getattr(config, name, None) for name in names})
    except ParseError as damage:
        raise ModelError(f"the {config.model_type} model has {damage}") from None
