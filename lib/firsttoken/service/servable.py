"""What a plain folder's files alone say against serving it, asked before a service listens and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firsttoken.assets.checkpoint import check_shard, stored_dtype, weight_files
from firsttoken.assets.model_config import CONFIG
from firsttoken.lean.config import LeanConfig, OtherWay, lean_config
from firsttoken.study.errors import ModelError
from firsttoken.study.foreign.json_text import read_json

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PASSED_OVER = ".rotary_emb.inv_freq"  # of old checkpoints
_WINDOW_OFF = {"qwen2", "qwen3"}  # whose sliding_window means nothing unless use_sliding_window is true


def check_servable(folder: Path) -> None:
    """Raises ModelError for a folder whose weights are not whole or of another model than its config.json, whose dtype
    is unknown, or whose layers see a part of the context only. What transformers alone can say, loading says."""
    files = weight_files(folder)
    stored_dtype(folder)
    _check_attention(read_json(folder / CONFIG, 1 << 24))
    try:
        shapes = _shapes(config := lean_config(folder))
    except OtherWay:
        return
    held = {name: entry.shape for file in files for name, entry in check_shard(file).tensors.items()}
    held = {name: shape for name, shape in held.items() if not name.endswith(_PASSED_OVER)}
    tied = {_EMBEDDING, _HEAD} if config.tie_word_embeddings else set()
    missing = [name for name in shapes if name not in held and not (name in tied and tied & held.keys())]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}; copy the whole checkpoint")
    for name, shape in held.items():
        if name not in shapes:
            raise ModelError(
                f"{folder}: the model has no parameter {name}, which its weights hold; copy {CONFIG} and weights of "
                "one model"
            )
        if shape != shapes[name]:
            raise ModelError(
                f"{folder}: {name} has shape {list(shape)}, and {CONFIG} asks for {list(shapes[name])}; copy both of "
                "one model"
            )


def _check_attention(config: dict[str, Any]) -> None:
    kinds = config.get("layer_types")
    if kinds is None and config.get("sliding_window"):
        used = config.get("use_sliding_window", config.get("model_type") not in _WINDOW_OFF)
        kinds = ["sliding_attention"] if used else None
    if isinstance(kinds, list) and (odd := {str(kind) for kind in kinds} - {"full_attention"}):
        raise ModelError(
            f"{config.get('model_type')} has layers of {min(odd)}; the engine runs full_attention only, so serve "
            "another model"
        )


def _shapes(config: LeanConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a lean model by name."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    linear = {
        "self_attn.q_proj": (queries, width, config.attention_bias),
        "self_attn.k_proj": (keys, width, config.attention_bias),
        "self_attn.v_proj": (keys, width, config.attention_bias),
        "self_attn.o_proj": (width, queries, config.output_bias),
        "mlp.gate_proj": (inner, width, config.mlp_bias),
        "mlp.up_proj": (inner, width, config.mlp_bias),
        "mlp.down_proj": (width, inner, config.mlp_bias),
    }
    shapes = {_EMBEDDING: (config.vocab_size, width), "model.norm.weight": (width,), _HEAD: (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        before = f"model.layers.{layer}."
        shapes |= {f"{before}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{before}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{before}{name}.bias"] = (rows,)
    return shapes
