"""Can this folder be served? What config.json and the headers of the weights tell, before a weight is read.

Of Llama and Qwen2 the standard library tells it, so that a service can ask before it imports torch. Of any other
architecture transformers tells it, which takes the seconds of its import.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.assets.checkpoint import CODES, EMBEDDING, HEAD, STORED, ModelFiles, model_files
from firsttoken.assets.known_models import Way, check_family, check_keys
from firsttoken.assets.model_config import CONFIG, FULL, SLIDING, ModelConfig, read_config
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.parse_errors import shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WINDOWED = {"gemma3_text"}
"""Model types whose windows the engine has; others pass on more than a window (sinks, soft limits)."""
_RESTING = re.compile(rf"(.+)\.({CODES}|scales)")
MEND = f"copy {CONFIG} and weights of one model"

Shapes = dict[str, tuple[int, ...]]


def check_servable(folder: Path, *, in_8_bits: bool = False, way: Way = "spans") -> ModelFiles:
    """The files of the plain model folder ``folder``, of which the engine can serve every layer in this ``way``.

    Raises ModelError, in one line, as ``model_files``, :func:`check_attention` and :func:`check_tensors` do. A staged
    folder is not asked here but by its manifest.
    """
    files = model_files(folder, in_8_bits=in_8_bits)
    check_attention(folder, way)
    check_tensors(files)
    return files


def check_attention(folder: Path, way: Way = "spans") -> None:
    """Raise ModelError unless the model of config.json is of a family that was compared in this ``way``, all of its
    keys are known, and every layer attends to the whole context, or to a window that the engine has."""
    config = read_config(folder)
    try:
        check_family(config.architecture, way)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    windowed = False
    if config.is_known:
        kinds, name = attention_kinds(config), config.architecture
        check_keys(folder / CONFIG, config.unread)
    else:
        from firsttoken.assets.empty_model import stock_config

        kind, stock = stock_config(folder)
        kinds, name, windowed = attention_kinds(stock), kind.__name__, has_windows(stock)
    if unknown_kinds := kinds - {FULL, *([SLIDING] if windowed else [])}:
        raise ModelError(
            f"{folder}: {name} has layers of {min(unknown_kinds)}, and only models of {FULL} are served; "
            "use another model"
        )


def has_windows(config: PretrainedConfig) -> bool:
    """Return whether the engine has the windows that layers of this model see."""
    return config.model_type in WINDOWED and not config.use_bidirectional_attention


def attention_kinds(config: PretrainedConfig | ModelConfig) -> set[str]:
    """Return the kinds of attention that the layers of a model have, in transformers' words."""
    if kinds := getattr(config, "layer_types", None):
        return {str(kind) for kind in kinds}
    # Mistral has a window, and no list as all of its layers are alike
    return {SLIDING} if getattr(config, "sliding_window", None) else {FULL}


def check_tensors(files: ModelFiles) -> None:
    """Raise ModelError unless ``files`` bring each tensor of their config.json's model, in its shape, and no other.

    What transformers renames as it loads (experts that are merged, for one) is for it to judge.
    """
    stored = _stored(files)
    if unknown_dtype := next((name for name, (dtype, _) in stored.items() if dtype not in STORED), ""):
        dtypes = ", ".join(STORED)
        raise ModelError(
            f"{unknown_dtype} in {files.folder} is stored as {stored[unknown_dtype][0]}; convert it to one of {dtypes}"
        )
    shapes = model_shapes(files.folder, files.config)
    lacking, more = [name for name in shapes if name not in stored], [name for name in stored if name not in shapes]
    if lacking and more and not files.config.is_known:
        return
    if more:
        raise ModelError(
            f"{files.folder} holds {shown(more[0], 100)}, which the model of its {CONFIG} does not have; {MEND}"
        )
    if lacking:
        raise ModelError(f"{files.folder} lacks {len(lacking)} tensors, first {lacking[0]}; copy the whole checkpoint")
    second = {HEAD: (files.second.entry.dtype, files.second.entry.shape)} if files.second else {}
    for name, (_, shape) in (stored | second).items():
        wanted = shapes[EMBEDDING if name == HEAD and files.second else name]
        if shape != wanted:
            raise ModelError(
                f"{name} in {files.folder} has the shape {list(shape)}, by {CONFIG} it has {list(wanted)}; {MEND}"
            )


def model_shapes(folder: Path, config: ModelConfig) -> Shapes:
    """The parameters of the model in ``folder`` by name, in the order of a forward pass, without a tied head.

    Raises ModelError for a model that transformers does not know, or that is not built as Llama is.
    """
    if config.is_known:
        return _known_shapes(config)
    import torch

    from firsttoken.assets.empty_model import build_on_meta

    return {name: tuple(parameter.shape) for name, parameter in build_on_meta(folder, torch.float32).named_parameters()}


def _known_shapes(config: ModelConfig) -> Shapes:
    """:func:`model_shapes` of Llama and Qwen2; the tests hold them against transformers."""
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    size, kv_heads = config.head_dim, config.num_key_value_heads
    assert size and kv_heads  # which are known of these
    rows, kv_rows = heads * size, kv_heads * size
    linears = {
        "self_attn.q_proj": ((rows, width), config.attention_bias),
        "self_attn.k_proj": ((kv_rows, width), config.attention_bias),
        "self_attn.v_proj": ((kv_rows, width), config.attention_bias),
        "self_attn.o_proj": ((width, rows), config.output_bias),
        "mlp.gate_proj": ((inner, width), config.mlp_bias),
        "mlp.up_proj": ((inner, width), config.mlp_bias),
        "mlp.down_proj": ((width, inner), config.mlp_bias),
    }
    shapes: Shapes = {EMBEDDING: (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name, (shape, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, width)
    return shapes


def _stored(files: ModelFiles) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape by the name that the model has for a tensor; of a layer in 8 bits its codes are the weight."""
    tensors = {}
    for name, stored in files.tensors.items():
        resting = _RESTING.fullmatch(name)
        if resting is None:
            tensors[name] = stored.entry.dtype, stored.entry.shape
        elif resting[2] == CODES:
            tensors[f"{resting[1]}.weight"] = "BF16", stored.entry.shape
    return tensors
