"""The dimensions of a decoder, dense or a mixture of experts: all that a simulated step's time and memory depend on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
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

    def kv_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of a token's keys and values at ``element_bytes`` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


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


def config_of(model: str, names: Iterable[str]) -> tuple[Path, ModelConfig]:
    """The folder that ``model`` is a path of, or of whose config.json, and that file; ``names`` are for the message.

    Raises ModelError where there is no such folder, and as ``read_config``.
    """
    path = Path(paths.expanded(model))
    folder = path.parent if path.name == CONFIG else path
    if not folder.is_dir():
        raise ModelError(f"no shape is called {model!r}, and no such folder is there; known: {', '.join(names)}")
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


@dataclass(frozen=True)
class MixtureShape:
    """A decoder ``dense`` whose MLP stands for one of ``experts``; each token takes ``active`` of these in a layer."""

    dense: DenseShape
    experts: int
    active: int

    @property
    def as_dense(self) -> DenseShape:
        """The dense shape with the same weights: one MLP as wide as all experts together."""
        return replace(self.dense, mlp=self.dense.mlp * self.experts)


# As the authors publish them in config.json; the experts' width stands for the MLP's.
MIXTURES = {
    "qwen3-235b-a22b": MixtureShape(DenseShape(94, 4096, 1536, 64, 4, 128, 151936, head_norms=True), 128, 8),
    "minimax-m2.5": MixtureShape(DenseShape(62, 3072, 1536, 48, 8, 128, 200064, head_norms=True), 256, 8),
}
_UNMEASURED = ("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace", "mlp_only_layers")


def model_shape(model: str) -> DenseShape | MixtureShape:
    """The shape of a published model by its name, or of the config.json at a path, be it dense or a mixture.

    Raises ModelError for a name that is not known and no path, a config.json that cannot be read, and a mixture with
    experts that all tokens take, or with layers without experts, of which there are no measured times.
    """
    if model in MIXTURES:
        return MIXTURES[model]
    if model in SHAPES:
        return SHAPES[model]
    folder, config = config_of(model, (*SHAPES, *MIXTURES))
    if not config.experts:
        return dense_of(config)
    if present := [name for name in _UNMEASURED if getattr(config, name)]:
        raise ModelError(f"{folder / CONFIG} has {present[0]}: no operators of such layers were measured")
    return _mixture_of(config, f"{folder / CONFIG}")


def _mixture_of(config: ModelConfig, label: str) -> MixtureShape:
    """Raises ModelError where the config does not say how many experts a token takes, in whole numbers."""
    counts = (config.experts, config.num_experts_per_tok, config.moe_intermediate_size or config.intermediate_size)
    if not all(type(count) is int and count > 0 for count in counts) or counts[1] > counts[0]:
        raise ModelError(f"{label} does not say how many experts there are, how wide, and how many a token takes")
    experts, active, width = counts
    return MixtureShape(replace(dense_of(config), mlp=width), experts, active)
