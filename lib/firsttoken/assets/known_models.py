"""What is known to be computed here as transformers computes it: families of models, and keys of config.json.

Each family of the lists was held against transformers through the ways that its list names
(``tests/assets/families_soak.py``). Every other one is refused by its name, and every key by its own that neither the
model's class reads nor is known to say nothing of how tokens become logits. Standard library only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.parse_errors import shown

Way = Literal["alone", "spans", "stages"]
"""How a model is taken: whole, from one plain folder and with nothing beside it; its layers apart, as a swarm, a
variant, a stored prefix and a worker do; or its tensors in stages, which serve in all three ways."""

_LISTS = tomllib.loads((Path(__file__).parent / "known_models.toml").read_text(encoding="utf-8"))
_IN_STAGES, _IN_SPANS, _ALONE = (frozenset(_LISTS[name]) for name in ("in_stages", "in_spans", "alone"))
_REFUSALS: dict[Way, str] = {
    "alone": "was not compared with transformers, and is not served",
    "spans": "is served from its own folder alone, and neither by a swarm nor with variants or stored prefixes",
    "stages": "is served, and not in stages",
}
_FAMILIES: dict[Way, frozenset[str]] = {
    "alone": _IN_STAGES | _IN_SPANS | _ALONE,
    "spans": _IN_STAGES | _IN_SPANS,
    "stages": _IN_STAGES,
}

SILENT, _SILENT_OFF = frozenset(_LISTS["silent"]), frozenset(_LISTS["silent_off"])
"""Keys that say nothing of how tokens become logits: whatever they hold, and where they are null, false or empty."""
_SILENT_AS: dict[str, list[Any]] = _LISTS["silent_as"]
_REPLACED = ("attn_logit_softcapping", "use_bidirectional_attention", "is_encoder_decoder")
"""Fields of transformers' classes that act within the attention, in whose place stands the engine's without them."""
COUNTED, COUNTED_FIELDS = frozenset(_LISTS["counted"]), frozenset(_LISTS["counted_fields"])
"""Families whose layers are a sum of measured operators, and what of their config.json is counted or takes no time."""
_READ_BY_ALL, _LLAMA = frozenset(_LISTS["read_by_all"]), frozenset(_LISTS["llama"])
FIELDS = {
    "LlamaForCausalLM": _LLAMA | {"attention_bias", "mlp_bias"},
    "Qwen2ForCausalLM": _LLAMA | {"use_sliding_window"},
}
"""What transformers' class reads of the models that are known without it, beside what is silent."""


def check_family(architecture: str, way: Way = "alone") -> None:
    """Raise ModelError for a model of ``architecture``, a class of transformers, that was not compared in this way."""
    family = architecture.removesuffix("ForCausalLM")
    if family in _FAMILIES[way] and family != architecture:
        return
    reason: Way = next(tried for tried in _FAMILIES if family not in _FAMILIES[tried] or tried == way)
    raise ModelError(f"{architecture} {_REFUSALS[reason]}; use one of {', '.join(sorted(_IN_STAGES))}")


def is_silent(key: str, value: Any) -> bool:
    """Return whether a ``key`` of config.json with this ``value`` says nothing of how tokens become logits."""
    if key in SILENT or (key in _SILENT_OFF and not value):
        return True
    return any(type(value) is type(silent) and value == silent for silent in _SILENT_AS.get(key, []))


def unread_keys(content: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """The keys of ``content``, of a config.json, that may say something and are none of ``fields``, which the model's
    class reads; and a field that acts within the attention."""
    return {
        key: value
        for key, value in sorted(content.items())
        if not is_silent(key, value) and (key in _REPLACED or not (key in fields or key in _READ_BY_ALL))
    }


def check_keys(path: Path, unread: Mapping[str, Any]) -> None:
    """Raise ModelError for the first of the ``unread`` keys of the config.json at ``path``."""
    for key, value in unread.items():
        raise ModelError(
            f"{path}: {shown(key)} is {shown(value)}, and what that changes is not computed here; use another model, "
            "or remove the key where it says nothing of the model"
        )
