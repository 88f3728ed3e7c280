"""The dimensions of a dense decoder, all that the time and the memory of a simulated step depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from firsttoken.assets.model_config import CONFIG, ModelConfig, read_config
from firsttoken.study import paths
from firsttoken.study.errors import ModelError


@dataclass(frozen=True)
class DenseShape:
    """Layers, widths and heads of a model whose MLP is gated. ``head_norms``: queries and keys are normalised, too."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_norms: bool = False

    @property
    def weights(self) -> int:
        """The number of weights: of all layers, of the embedding and of the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + 2 * self.hidden * self.vocabulary

    def kv_bytes(self, each: int = 2) -> int:
        """Bytes of a token's keys and values at ``each`` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * each


# As the authors publish them in config.json: layers, hidden, MLP, heads, KV heads, head width, vocabulary.
SHAPES = {
    "mistral-7b": DenseShape(32, 4096, 14336, 32, 8, 128, 32000),
    "yi-34b": DenseShape(60, 7168, 20480, 56, 8, 128, 64000),
    "llama-2-70b": DenseShape(80, 8192, 28672, 64, 8, 128, 32000),
    "llama-3.1-8b": DenseShape(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": DenseShape(80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-32b": DenseShape(64, 5120, 25600, 64, 8, 128, 151936, head_norms=True),
}


def dense_shape(model: str) -> DenseShape:
    """The shape of a published model by its name, or of the config.json at a path.

    Raises ModelError for a name that is not known and no path, a config.json that cannot be read, and a mixture of
    experts, whose layers take as long as its routing says.
    """
    if model in SHAPES:
        return SHAPES[model]
    folder, config = config_of(model, SHAPES)
    if config.experts:
        raise ModelError(f"{folder / CONFIG} is of a mixture of experts; give a dense model")
    return dense_of(config)


def config_of(model: str, known: Iterable[str]) -> tuple[Path, ModelConfig]:
    """The folder that ``model`` is a path of, or of whose config.json, and that file; ``known`` are for the message.

    Raises ModelError where there is no such folder, and as ``read_config``.
    """
    path = Path(paths.expanded(model))
    folder = path.parent if path.name == CONFIG else path
    if not folder.is_dir():
        raise ModelError(f"no shape is called {model!r}, and no such folder is there; known: {', '.join(known)}")
    return folder, read_config(folder)


def dense_of(config: ModelConfig) -> DenseShape:
    """The shape that ``config`` states, its MLP as wide as ``intermediate_size`` says."""
    heads = config.num_attention_heads
    return DenseShape(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        heads,
        config.num_key_value_heads or heads,
        config.head_dim or config.hidden_size // heads,
        config.vocab_size,
        config.architecture.startswith("Qwen3"),
    )
