"""Says which model computed a KV cache, and whether another model may use it.

DroidSpeak shares caches between fine-tunes of one base model (4.1): weights differ, everything that gives keys and
values their shape and their angles must not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.known_models import is_silent
from firsttoken.assets.servable import has_windows
from firsttoken.assets.text_tokenizer import check_same_ids
from firsttoken.engine.kv import KVShape
from firsttoken.study.errors import CacheError

_MUST_AGREE = {
    "architecture": "architecture",
    "layers": "number of layers",
    "kv_heads": "number of KV heads",
    "head_dim": "head size",
    "hidden": "hidden size",
    "dtype": "dtype",
    "rope": "rope scaling",
    "tokenizer": "tokenizer",
}
_CALL_SETTINGS = ("padding", "truncation")  # what the last call to the tokenizer asked for, not what it is
_SYNONYMS = ("type",)  # of "rope_type", in configurations from before transformers 5


@dataclass(frozen=True)
class ModelIdentity:
    """All that a KV cache depends on beside its tokens; ``key`` stands for all of it.

    ``weights``, ``adapters`` ("" without) and ``tokenizer`` ("" without) are hex sha256 sums, ``dtype`` is torch's name
    ("bfloat16"), ``rope`` the rotary parameters and the windows as sorted JSON, ``hidden`` and ``head_dim`` count
    numbers a token. ``config`` is config.json as sorted JSON, without keys that are known to say nothing of what is
    computed. ``owner`` says whose it is: nobody else may read what is stored under a name, and everybody what is under
    none.
    """

    weights: str
    adapters: str
    dtype: str
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope: str
    tokenizer: str
    config: str
    owner: str = ""

    @cached_property
    def key(self) -> str:
        """The identity as 16 hex digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def anybody(self) -> ModelIdentity:
        """The model, whoever owns what it computed."""
        return replace(self, owner="")

    def may_read(self, stored: ModelIdentity) -> bool:
        """Return whether a cache that ``stored`` computed is for everybody, or of the same owner."""
        return stored.owner in ("", self.owner)

    def __str__(self) -> str:
        return f"{self.architecture} {self.key}"


def identify(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, weights: str, adapters: str = "", owner: str = ""
) -> ModelIdentity:
    """The identity of ``model`` with weights of sha256 ``weights``.

    Raises ModelError for an architecture without ``model.layers``.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config
    shape = KVShape.of(config, base.dtype)
    # all of config.json, and the defaults of what it leaves out, that may say what is computed
    relevant = {key: value for key, value in config.to_dict().items() if not is_silent(key, value)}
    return ModelIdentity(
        weights=weights,
        adapters=adapters,
        dtype=str(base.dtype).removeprefix("torch."),
        architecture=type(base).__name__,
        layers=len(layers_of(base)),
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden=config.hidden_size,
        rope=json.dumps(_plain(_positions(config)), sort_keys=True),
        tokenizer=_tokenizer_sha256(tokenizer) if tokenizer is not None else "",
        config=json.dumps(_plain(relevant), sort_keys=True, default=str),
        owner=owner,
    )


def identify_folder(folder: Path, dtype: torch.dtype, weights: str, owner: str = "") -> ModelIdentity:
    """The identity of the model in ``folder``, computing in ``dtype``; no weight is read. It imports transformers.

    Raises ModelError for a folder that transformers does not know, or whose text it reads otherwise than the service.
    """
    from transformers import AutoTokenizer

    from firsttoken.assets.empty_model import build_on_meta

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    check_same_ids(folder, tokenizer)
    return identify(build_on_meta(folder, dtype), tokenizer, weights, owner=owner)


def difference(stored: ModelIdentity, wanted: ModelIdentity) -> str:
    """The first reason why ``wanted`` cannot use what ``stored`` computed, empty where it can; weights may differ."""
    if not wanted.may_read(stored):
        return "another owner"
    for field, words in _MUST_AGREE.items():
        theirs, ours = getattr(stored, field), getattr(wanted, field)
        if theirs != ours:
            if field == "tokenizer":
                theirs, ours = (sum_[:12] or "none" for sum_ in (theirs, ours))
            return f"another {words} ({theirs}, not {ours})"
    return ""


def explain_mismatch(stored: ModelIdentity, wanted: ModelIdentity) -> str:
    """Why ``wanted``, which has another key than ``stored``, is not the model that computed it."""
    if (reason := difference(stored, wanted)) or stored.config == wanted.config:
        return reason or "other weights, so ask for it under its own identity"
    theirs, ours = json.loads(stored.config), json.loads(wanted.config)
    key = min(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    return f"another config.json ({key} is {theirs.get(key)}, not {ours.get(key)})"


def check_compatible(sender: ModelIdentity, receiver: ModelIdentity) -> None:
    """Raise CacheError, with the first reason, when ``receiver`` cannot use the KV cache of ``sender``."""
    if reason := difference(sender, receiver):
        raise CacheError(f"the cache of {sender} does not fit {receiver}: {reason}; prefill without it")


def _positions(config: PretrainedConfig) -> dict[str, Any]:
    """Return how a layer treats positions: its rotary parameters, and the window that it sees, where it has one."""
    windows = {name: getattr(config, name) for name in ("layer_types", "sliding_window") if has_windows(config)}
    return (getattr(config, "rope_parameters", None) or {}) | windows


def _plain(value: Any) -> Any:
    """One form for each meaning: 10000 and 1e4 are one base, and a parameter that is None is not there."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None and k not in _SYNONYMS}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: dict[str, Any] = {"vocabulary": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}
    else:
        content = {k: v for k, v in json.loads(backend.to_str()).items() if k not in _CALL_SETTINGS}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
