"""config.json of a model, as far as it is used before transformers reads it: sizes within what a machine can build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from firsttoken.study.errors import ModelError
from firsttoken.study.foreign.faults import blaming
from firsttoken.study.foreign.json_text import read_json
from firsttoken.study.foreign.schema import between, shaped

CONFIG = "config.json"
MOST_LAYERS = 1000  # the deepest published models have fewer than 200
CONTEXTS = {"llama": 2048, "qwen2": 32_768, "mistral": 131_072}  # the defaults of max_position_embeddings
_Width = Annotated[int, between(1, 1 << 20)]


@dataclass(frozen=True)
class ModelConfig:
    """What is used of it; ``torch_dtype`` is what transformers called ``dtype`` before version 5."""

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
    max_position_embeddings: Annotated[int, between(1, 1 << 40)] | None = None

    @property
    def architecture(self) -> str:
        """The class in transformers."""
        return self.architectures[0]

    @property
    def stored(self) -> str | None:
        """Torch's name of the dtype that it says its weights have; None where it leaves that to the weights."""
        return next((name for name in (self.dtype, self.torch_dtype) if name and name != "auto"), None)


def read_config(folder: Path) -> ModelConfig:
    """The config.json in ``folder``. Raises ModelError when it is missing, no JSON, or of sizes that no model has."""
    path = folder / CONFIG
    with blaming(path, ModelError, "copy the model's own"):
        return shaped(ModelConfig, read_json(path, 1 << 24), others=True)


def context_of(folder: Path) -> int:
    """The positions of the model in ``folder``: what its config.json says, or what its class in transformers has.

    Raises ModelError as :func:`read_config`, and where neither says it.
    """
    config = read_config(folder)
    if config.max_position_embeddings is not None:
        return config.max_position_embeddings
    if config.model_type in CONTEXTS:
        return CONTEXTS[config.model_type]
    raise ModelError(f"{folder / CONFIG}: max_position_embeddings is missing, and {config.model_type} has no default")
