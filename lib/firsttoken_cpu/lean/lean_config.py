"""Whether a lean decoder computes what config.json describes, or another way to start has to (standard library only, so
that it can be asked before torch is there).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firsttoken.assets.model_config import FULL, ModelConfig, read_config
from firsttoken.study.errors import NotLean
from firsttoken.study.parsing.parse_errors import shown

ROTARY = ("default", "linear", "llama3")


class LeanConfig(ModelConfig):
    """A config.json of a lean decoder; ``_attn_implementation`` alone changes, when an engine asks."""

    _attn_implementation = "sdpa"


def lean_config(folder: Path) -> LeanConfig:
    """The shape of the model in ``folder``.

    Raises NotLean where anything in its config.json is not known to be computed here as transformers does: another
    architecture, activation or kind of positions, a sliding window, a key that was never heard of. Raises ModelError as
    :func:`read_config`.
    """
    config = read_config(folder)
    if not config.is_known:
        raise NotLean(f"its architecture is {config.architecture}")
    if config.hidden_act != "silu":
        raise NotLean(f"its hidden_act is {shown(config.hidden_act)}")
    if windows := set(config.layer_types or ()) - {FULL}:
        raise NotLean(f"its layers are of {shown(min(windows))}")
    for rope in config.rotary:
        if rope.rope_type not in ROTARY:
            raise NotLean(f"its rope_type is {shown(rope.rope_type)}")
        if rope.more:
            raise NotLean(f"its rope_parameters have {shown(rope.more[0])}")
    for key, value in config.unread.items():
        raise NotLean(f"its {shown(key)} is {shown(value)}")
    return LeanConfig(**vars(config))


def scaled_frequencies(config: LeanConfig, steps: Any, select: Callable[..., Any]) -> Any:
    """Radians a token [head_dim / 2] of ``steps``, the places 0, 2 ... of a head over its width: fp32, as ``steps`` is
    torch's or numpy's, whose ``select`` it is."""
    rope = config.rotary[0]
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
