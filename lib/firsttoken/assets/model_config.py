"""config.json of a model, as far as it is used before transformers reads it: sizes within what a machine can build."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from firsttoken.assets.positions import check_kinds
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import Damaged, blaming, shown
from firsttoken.study.parsing.schema import between, shaped

CONFIG = "config.json"
MOST_LAYERS = 1000  # the deepest published models have fewer than 200
KINDS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
"""The model_type of an architecture whose tensors are known here without transformers."""

_CAUSAL = "ForCausalLM"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_STORED = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
_Width = Annotated[int, between(1, 1 << 20)]


@dataclass(frozen=True)
class ModelConfig:
    """The keys of a config.json that are used; ``torch_dtype`` is transformers' name of ``dtype`` before version 5.

    Of ``quantization_config`` and ``transformers_weights`` it matters only whether they are there.
    """

    architectures: tuple[str]
    num_hidden_layers: Annotated[int, between(1, MOST_LAYERS)]
    hidden_size: _Width
    intermediate_size: _Width
    num_attention_heads: _Width
    vocab_size: Annotated[int, between(1, 1 << 24)]
    num_key_value_heads: _Width | None = None
    head_dim: _Width | None = None
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
    n_shared_experts: Any = None
    shared_expert_intermediate_size: Any = None
    first_k_dense_replace: Any = None
    mlp_only_layers: Any = None
    quantization_config: Any = None
    transformers_weights: Any = None

    def __post_init__(self) -> None:
        kind = KINDS.get(self.architecture)
        if not self.architecture.endswith(_CAUSAL):
            raise Damaged(f"architectures: {shown(self.architecture)} is no causal language model (...{_CAUSAL})")
        if kind and self.model_type not in (kind, None):
            raise Damaged(f"model_type: {shown(self.model_type)} is not that of {self.architecture}")
        if self.stored not in (*_STORED, None):
            raise Damaged(f"dtype: {shown(self.stored)} is none of weights; known: {', '.join(_STORED)}")

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
    with blaming(path, ModelError, "copy the model's own"):
        content = read_json(path, 1 << 24)
        sizes = shaped(ModelConfig, content, others=True)
        check_kinds(content)
        return sizes
