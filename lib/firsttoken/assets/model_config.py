"""config.json of a model, read by the standard library alone: a start that imports neither torch nor transformers asks
it, and whoever plans, stages or serves a model.

Of Llama and Qwen2 everything is known: what the file leaves out is as transformers' class has it, and a value that no
model has is refused. Of other architectures the class itself judges what is not here.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from firsttoken.assets.known_models import FIELDS, unread_keys
from firsttoken.assets.positions import Length, Rotary, read_rotary
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, shown
from firsttoken.study.parsing.schema import between, parse_as

CONFIG = "config.json"
MOST_LAYERS = 1000  # the deepest published models have fewer than 200
FULL, SLIDING = "full_attention", "sliding_attention"
_LLAMA, _QWEN2 = "LlamaForCausalLM", "Qwen2ForCausalLM"
KINDS = {_LLAMA: "llama", _QWEN2: "qwen2"}
"""The model_type of an architecture whose tensors are known here without transformers."""

_CAUSAL = "ForCausalLM"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_STORED = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
_Width = Annotated[int, between(1, 1 << 20)]
_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    _LLAMA: _COMMON | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    _QWEN2: _COMMON | {"max_position_embeddings": 32_768},
    "MistralForCausalLM": {"max_position_embeddings": 131_072},
}
"""The values that transformers' class has where config.json leaves them out."""
_FIXED = {_QWEN2: {"attention_bias": True, "mlp_bias": False}}
"""The values that a class has whatever config.json says."""


@dataclass(frozen=True)
class ModelConfig:
    """The keys of a config.json that are used; ``torch_dtype`` is transformers' name of ``dtype`` before version 5.

    ``layer_types`` are the kinds of attention, of each layer or one for all. ``unread`` are the keys of Llama and Qwen2
    that might change what is computed, and are not known. Of ``quantization_config`` and ``transformers_weights`` it
    matters only whether they are there.
    """

    architectures: tuple[str]
    num_hidden_layers: Annotated[int, between(1, MOST_LAYERS)]
    hidden_size: _Width
    intermediate_size: _Width
    num_attention_heads: _Width
    vocab_size: Annotated[int, between(1, 1 << 24)]
    num_key_value_heads: _Width | None = None
    head_dim: _Width | None = None
    max_position_embeddings: Length | None = None
    rms_norm_eps: Annotated[float, between(0, 1)] | None = None
    hidden_act: str | None = None
    rotary: tuple[Rotary, ...] = (Rotary(),)
    layer_types: tuple[str, ...] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    model_type: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    num_experts: Any = None
    num_local_experts: Any = None
    num_experts_per_tok: Any = None
    moe_intermediate_size: Any = None
    quantization_config: Any = None
    transformers_weights: Any = None
    unread: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.architecture.endswith(_CAUSAL):
            raise ParseError(f"architectures: {shown(self.architecture)} is no causal language model (...{_CAUSAL})")
        if self.stored not in (*_STORED, None):
            raise ParseError(f"dtype: {shown(self.stored)} is none of weights; known: {', '.join(_STORED)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads and heads % kv_heads:
            raise ParseError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if not self.is_known:
            return
        if self.model_type != KINDS[self.architecture]:
            raise ParseError(f"model_type: {shown(self.model_type)} is not that of {self.architecture}")
        if not kv_heads:
            raise ParseError("missing key 'num_key_value_heads'")
        if not self.head_dim:
            raise ParseError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {heads}, without a head_dim"
            )
        if self.head_dim % 2:
            raise ParseError(f"head_dim {self.head_dim} is odd, and positions rotate pairs")

    @property
    def architecture(self) -> str:
        """Return the model's class in transformers."""
        return self.architectures[0]

    @property
    def experts(self) -> Any:
        """Return the number of experts of a layer; nothing where its MLP is dense."""
        return self.num_experts or self.num_local_experts

    @property
    def is_known(self) -> bool:
        """Return whether the tensors of this architecture are known without transformers."""
        return self.architecture in KINDS

    @property
    def output_bias(self) -> bool:
        """Return whether the projection behind the attention has a bias: Qwen2's queries, keys and values alone do."""
        return bool(self.attention_bias) and self.architecture != _QWEN2

    @property
    def stored(self) -> str | None:
        """Torch's name of the dtype that it says its weights have; None where it leaves that to the weights."""
        named = self.dtype or self.torch_dtype
        return None if named == "auto" else named


def hub_name(folder: Path) -> str:
    """The name of a ``folder`` that is not there, if a model of the Hugging Face Hub may have it, or ""."""
    name = os.path.relpath(folder) if len(str(folder)) < 4096 else ""
    return name if _HUB_NAME.fullmatch(name) and not os.path.isdir(os.path.dirname(name)) else ""


def public_name(folder: Path) -> str:
    """The name of a model's ``folder``, or of the model whose snapshot in the Hub's cache it is."""
    kind, _, name = folder.parent.parent.name.partition("--")
    return name.replace("--", "/") if kind == "models" and folder.parent.name == "snapshots" else folder.name


def hub_snapshot(name: str) -> Path | None:
    """The folder of the model ``name`` in this machine's cache of the Hub, where its branch main was when it was last
    downloaded, or else the newest; None: it has none."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    model = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub") / f"models--{name.replace('/', '--')}"
    with suppress(OSError, ValueError):
        main = model / "snapshots" / (model / "refs" / "main").read_text(encoding="ascii")
        if (main / CONFIG).is_file():
            return main
    return max((file.parent for file in model.glob(f"snapshots/*/{CONFIG}")), key=os.path.getmtime, default=None)


def _on_the_hub(folder: Path) -> str:
    """Return the advice for a ``folder`` that is not there."""
    if not (name := hub_name(folder)):
        return f"give a folder with {CONFIG} and *.safetensors"
    if snapshot := hub_snapshot(name):
        return f"the Hub's cache has this model: name {snapshot}"
    return f"if it is on the Hub, run `hf download {name}` and try again"


def check_folder(folder: Path) -> None:
    """Raise ModelError unless ``folder`` is one, and has a config.json."""
    if os.path.isfile(folder):
        raise ModelError(f"{folder} is a file; give a folder with {CONFIG} and *.safetensors (GGUF is not read)")
    if not os.path.isdir(folder):  # of a name that is too long pathlib's own raises
        raise ModelError(f"no model folder {folder}; {_on_the_hub(folder)}")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; a model folder holds {CONFIG} and *.safetensors")


def read_config(folder: Path) -> ModelConfig:
    """The config.json in ``folder``.

    Raises ModelError when it is missing, no JSON, of sizes that no model has, says two things of what it is, or names
    rotary positions of a kind that is not known.
    """
    check_folder(folder)
    path = folder / CONFIG
    with errors_as(path, ModelError, "copy the model's own"):
        content = read_json(path, 1 << 24)
        if not isinstance(content, Mapping):
            raise ParseError("it is no mapping")
        names = content.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        fields = {key: value for key, value in content.items() if key not in ("rotary", "unread")}
        unread: dict[str, Any] = {}
        if name in KINDS:
            fields, unread = _resolved(name, fields), unread_keys(content, FIELDS[name])
        elif fields.get("max_position_embeddings") is None:
            fields |= _DEFAULTS.get(name, {})
        return replace(parse_as(ModelConfig, fields, others=True), rotary=read_rotary(content), unread=unread)


def _resolved(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The ``content`` with what it leaves to the class ``name`` of transformers, one of ``KINDS``."""
    fields = _DEFAULTS[name] | {"model_type": KINDS[name], "layer_types": [_attention(name, content)]}
    fields |= {key: value for key, value in content.items() if value not in (None, [])} | _FIXED.get(name, {})
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    if name == _LLAMA:
        fields.setdefault("num_key_value_heads", heads)
    if type(heads) is type(width) is int and heads > 0 and not width % heads:
        fields.setdefault("head_dim", width // heads)
    return fields


def _attention(name: str, content: Mapping[str, Any]) -> str:
    """The kind of attention that some layer has where ``layer_types`` do not say it."""
    if name == _LLAMA:
        return SLIDING if content.get("sliding_window") else FULL
    first, depth = content.get("max_window_layers", 28), content.get("num_hidden_layers")
    windowed = not (type(first) is type(depth) is int and first >= depth)
    used = content.get("use_sliding_window") and content.get("sliding_window", 4096)
    return SLIDING if used and windowed else FULL
