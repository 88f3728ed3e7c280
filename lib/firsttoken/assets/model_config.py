"""config.json of a model, as far as it is used before transformers reads it: sizes within what a machine can build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from firsttoken.assets.positions import check_kinds
from firsttoken.study.errors import ModelError
from firsttoken.study.foreign.faults import blaming
from firsttoken.study.foreign.json_text import read_json
from firsttoken.study.foreign.schema import between, shaped

CONFIG = "config.json"
MOST_LAYERS = 1000  # the deepest published models have fewer than 200
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

    @property
    def architecture(self) -> str:
        """The class in transformers."""
        return self.architectures[0]

    @property
    def stored(self) -> str | None:
        """Torch's name of the dtype that it says its weights have."""
        return self.dtype or self.torch_dtype


def read_config(folder: Path) -> ModelConfig:
    """The config.json in ``folder``. Raises ModelError when it is missing, no JSON, or of sizes that no model has, and
    for rotary positions of a kind that is not known."""
    path = folder / CONFIG
    with blaming(path, ModelError, "copy the model's own"):
        content = read_json(path, 1 << 24)
        sizes = shaped(ModelConfig, content, others=True)
        check_kinds(content)
        return sizes
