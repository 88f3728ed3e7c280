"""config.json as far as a lean decoder needs it: all that decides what is computed, or another way to start
(standard library only, so that it can be asked before torch is there).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from firsttoken.assets.known_models import is_silent
from firsttoken.assets.model_config import CONFIG, KINDS, MOST_LAYERS
from firsttoken.study.errors import ModelError, NotLean
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import Damaged, blaming, shown
from firsttoken.study.parsing.schema import between, shaped

MEND = "copy the model's own"
ROTARY = ("default", "linear", "llama3")

_Width = Annotated[int, between(1, 1 << 20)]
_Positive = Annotated[float, between(1e-12, 1e12)]


@dataclass(frozen=True)
class Rotary:
    """The rotary positions: base ``rope_theta``, and how its frequencies are scaled (Llama 3.1 has "llama3")."""

    rope_type: str = "default"
    rope_theta: _Positive = 10_000.0
    factor: _Positive = 1.0
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    original_max_position_embeddings: _Positive | None = None


@dataclass
class LeanConfig:
    """The shape of a decoder, under transformers' names; ``_attn_implementation`` alone changes, when an engine asks.

    Qwen2 is Llama with biases on queries, keys and values: ``attention_bias`` is theirs, ``output_bias`` that of the
    projection behind them.
    """

    architectures: tuple[str]
    vocab_size: Annotated[int, between(1, 1 << 24)]
    hidden_size: _Width
    intermediate_size: _Width
    num_hidden_layers: Annotated[int, between(1, MOST_LAYERS)]
    num_attention_heads: _Width
    num_key_value_heads: _Width
    head_dim: _Width
    max_position_embeddings: Annotated[int, between(1, 1 << 40)]
    rms_norm_eps: Annotated[float, between(0, 1)]
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    rotary: Rotary
    _attn_implementation: str = "sdpa"

    @property
    def model_type(self) -> str:
        """Return the name of the model's kind, for messages."""
        return KINDS[self.architectures[0]]


def lean_config(folder: Path) -> LeanConfig:
    """The shape of the model in ``folder``.

    Raises NotLean where anything in its config.json is not known to be computed here as transformers does: another
    architecture, activation or kind of positions, a sliding window, quantised weights, a key that was never heard of.
    Raises ModelError for a file that is missing, no JSON, or holds a value that no model has.
    """
    with blaming(folder / CONFIG, ModelError, MEND):
        content = read_json(folder / CONFIG, 1 << 24)
        if not isinstance(content, dict):
            raise Damaged("it is no mapping")
        names = content.pop("architectures", None)
        if not (isinstance(names, list) and len(names) == 1 and names[0] in KINDS):
            raise NotLean(f"its architecture is {shown(names)}")
        return _checked(shaped(LeanConfig, _told(dict(content), names)))


def _told(content: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """``content`` with everything that it leaves to transformers' defaults; raises NotLean for what is left over."""
    kind = KINDS[names[0]]
    if content.pop("model_type", kind) != kind:
        raise NotLean(f"its model_type is not {kind}")
    if (activation := content.pop("hidden_act", "silu")) != "silu":
        raise NotLean(f"its hidden_act is {shown(activation)}")
    rotary = _rotary(content)
    fields = {
        "architectures": names,
        "rotary": rotary,
        "max_position_embeddings": 2048 if kind == "llama" else 32_768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "mlp_bias": False,
    }
    field_names = set(LeanConfig.__dataclass_fields__) - {"output_bias", "_attn_implementation", "rotary"}
    if kind == "qwen2":
        field_names -= {"attention_bias", "mlp_bias"}
        _plain_window(content)
    for key in list(content):
        if key in field_names:
            if (value := content.pop(key)) is not None:
                fields[key] = value
        elif is_silent(key, content[key]):
            content.pop(key)
    if content:
        key = min(content)
        raise NotLean(f"its {shown(key)} is {shown(content[key])}")
    fields.setdefault("attention_bias", kind == "qwen2")
    fields["output_bias"] = fields["attention_bias"] if kind == "llama" else False
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    if kind == "llama" and heads is not None:
        fields.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        if "head_dim" not in fields and width % heads:
            raise Damaged(
                f"hidden_size {width} is no multiple of num_attention_heads {heads}, and there is no head_dim"
            )
        fields.setdefault("head_dim", width // heads)
    return fields


def _plain_window(content: dict[str, Any]) -> None:
    """Qwen2 names a window that it does not use; raises NotLean where it does."""
    if content.pop("use_sliding_window", False):
        raise NotLean("its use_sliding_window is true")
    content.pop("sliding_window", None)
    kinds = content.pop("layer_types", None) or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise NotLean("its layer_types are not all full_attention")


def _rotary(content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary positions, as transformers 5 writes them ("rope_parameters") or as those before
    it did."""
    old, new = content.pop("rope_scaling", None), content.pop("rope_parameters", None)
    if old and new:
        raise NotLean("it has both rope_scaling and rope_parameters")
    rope = old or new or {}
    if not isinstance(rope, Mapping):
        raise Damaged(f"rope_parameters: expected a mapping, not {shown(rope)}")
    rotary = dict(rope)
    kind = rotary.pop("type", None)
    kind = rotary.setdefault("rope_type", kind or "default")
    if kind not in ROTARY:
        raise NotLean(f"its rope_type is {shown(kind)}")
    if (base := content.pop("rope_theta", None)) is not None:
        rotary.setdefault("rope_theta", base)
    if unknown := rotary.keys() - Rotary.__dataclass_fields__.keys():
        raise NotLean(f"its rope_parameters have {shown(min(unknown))}")
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}[kind]
    if missing := [key for key in needed if key not in rotary]:
        raise Damaged(f"rope_parameters: missing key {missing[0]!r}")
    return rotary


def scaled_frequencies(config: LeanConfig, steps: Any, select: Callable[..., Any]) -> Any:
    """Radians a token [head_dim / 2] of ``steps``, the places 0, 2 ... of a head over its width: fp32, as ``steps`` is
    torch's or numpy's, whose ``select`` it is."""
    rope = config.rotary
    plain = 1.0 / (rope.rope_theta**steps)
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "linear":
        return plain / rope.factor
    # Long waves are stretched by ``factor``, short ones kept, those between blended (Llama 3.1, model card)
    before = rope.original_max_position_embeddings or config.max_position_embeddings
    waves = 2 * math.pi / plain
    scaled = select(waves > before / rope.low_freq_factor, plain / rope.factor, plain)
    blend = (before / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    between = ~(waves < before / rope.high_freq_factor) & ~(waves > before / rope.low_freq_factor)
    return select(between, blended, scaled)


def _checked(config: LeanConfig) -> LeanConfig:
    if config.num_attention_heads % config.num_key_value_heads:
        raise Damaged(
            f"num_attention_heads {config.num_attention_heads} is no multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise Damaged(f"head_dim {config.head_dim} is odd, and positions rotate pairs")
    if config.rotary.rope_type == "llama3" and config.rotary.high_freq_factor == config.rotary.low_freq_factor:
        raise Damaged("rope_parameters: high_freq_factor equals low_freq_factor")
    return config
