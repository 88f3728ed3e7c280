"""The dimensions of a decoder, dense or a mixture of experts: all that a simulated step's time and memory depend on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firsttoken.assets.known_models import COUNTED, COUNTED_FIELDS, check_keys, unread_keys
from firsttoken.assets.model_config import CONFIG, FULL, ModelConfig, check_folder, read_config
from firsttoken.study import paths
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, shown


@dataclass(frozen=True)
class DenseShape:
    """Layers, widths and heads of a model whose MLP is gated. ``head_norms``: queries and keys are normalised, too;
    ``tied``: embedding and head are one matrix. ``context`` is the most tokens of a request, 0 where it is not stated,
    and ``stored`` the type of the weights of its layers."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_norms: bool = False
    tied: bool = False
    context: int = 0
    stored: str = "bfloat16"

    @property
    def weights(self) -> int:
        """The number of weights: of all layers, of the embedding and of the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + (2 - self.tied) * self.hidden * self.vocabulary

    def kv_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of a token's keys and values at ``element_bytes`` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


# As the authors publish them in config.json: layers, hidden, MLP, heads, KV heads, head width, vocabulary. Mistral-7B
# is one without a window (v0.2 and later), Yi-34B that of 200,000 tokens, which Sarathi-Serve's artifact runs.
SHAPES = {
    "mistral-7b": DenseShape(32, 4096, 14336, 32, 8, 128, 32000, context=32768),
    "yi-34b": DenseShape(60, 7168, 20480, 56, 8, 128, 64000, context=200_000),
    "llama-2-70b": DenseShape(80, 8192, 28672, 64, 8, 128, 32000, context=4096),
    "llama-3.1-8b": DenseShape(32, 4096, 14336, 32, 8, 128, 128256, context=131_072),
    "llama-3.1-70b": DenseShape(80, 8192, 28672, 64, 8, 128, 128256, context=131_072),
    "qwen3-32b": DenseShape(64, 5120, 25600, 64, 8, 128, 151936, head_norms=True, context=40960),
}
_MEND = "use a model whose layers are known"
_QUANTISED = ("hf_quant_config.json", "quantize_config.json")  # they say so of the weights beside them
# with these values a key of a mixture says that all layers have routed experts and no others
_ABSENT: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "n_shared_experts": 0}


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

    Raises ModelError where there is no such folder, as ``read_config``, and as ``check_counted``.
    """
    path = Path(paths.expanded(model))
    folder = path.parent if path.name == CONFIG else path
    if not folder.is_dir():
        raise ModelError(f"no shape is called {model!r}, and no such folder is there; known: {', '.join(names)}")
    check_folder(folder)
    check_counted(folder / CONFIG)
    return folder, read_config(folder)


def check_counted(path: Path) -> None:
    """Raise ModelError unless each layer of the config.json at ``path`` is a sum of measured operators: a family of
    ``COUNTED``, full attention, weights in 16 bits or in floats of 8, no key but those that are known."""
    with errors_as(path, ModelError, _MEND):
        content = read_json(path, 1 << 24)
        names = content.get("architectures") if isinstance(content, Mapping) else None
        family = str(names[0]).removesuffix("ForCausalLM") if isinstance(names, list) and names else ""
        if family not in COUNTED:
            raise ParseError(
                f"the layers of {shown(family or names)} are not known here; known: {', '.join(sorted(COUNTED))}"
            )
        # transformers' class of Mistral has a window where config.json leaves it out
        window = content.get("sliding_window", 4096 if family == "Mistral" else None)
        full = content.get("use_sliding_window") is False or window == content.get("max_position_embeddings")
        part = [kind for kind in content.get("layer_types") or () if kind != FULL]
        if part or (window and not full):
            kind = part[0] if part else f"sliding_window {window}"
            raise ParseError(f"{shown(kind)}: attention to less than all tokens before is not counted")
        if beside := [name for name in _QUANTISED if (path.parent / name).exists()]:
            raise ParseError(f"{beside[0]} beside it says that its weights are quantised, which is not counted")
        if weights := content.get("quantization_config"):
            type_of = weights if isinstance(weights, Mapping) else {}
            method, blocks = type_of.get("quant_method"), type_of.get("weight_block_size")
            if method != "fp8" or bool(blocks) != bool(content.get("num_experts") or content.get("num_local_experts")):
                kind = f"{shown(method)}{' in blocks' if blocks else ''}"
                raise ParseError(
                    f"products of weights in {kind} are not counted; known: 16 bits, fp8, experts' in blocks"
                )
    content = {key: value for key, value in content.items() if key not in _ABSENT or value != _ABSENT[key]}
    check_keys(path, unread_keys(content, COUNTED_FIELDS))


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
        bool(config.tie_word_embeddings),
        config.max_position_embeddings or 0,
        "fp8" if config.quantization_config else "bfloat16",
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
    "qwen3-235b-a22b": MixtureShape(
        DenseShape(94, 4096, 1536, 64, 4, 128, 151936, head_norms=True, context=40960, stored="fp8"), 128, 8
    ),
    "minimax-m2.5": MixtureShape(
        DenseShape(62, 3072, 1536, 48, 8, 128, 200064, head_norms=True, context=196_608, stored="fp8"), 256, 8
    ),
}


def model_shape(model: str) -> DenseShape | MixtureShape:
    """The shape of a published model by its name, or of the config.json at a path, be it dense or a mixture.

    Raises ModelError for a name that is not known and no path, a config.json that cannot be read, and one of which some
    layer is not known, as ``check_counted``.
    """
    if model in MIXTURES:
        return MIXTURES[model]
    if model in SHAPES:
        return SHAPES[model]
    folder, config = config_of(model, (*SHAPES, *MIXTURES))
    return _mixture_of(config, f"{folder / CONFIG}") if config.experts else dense_of(config)


def _mixture_of(config: ModelConfig, label: str) -> MixtureShape:
    """Raises ModelError where the config does not say how many experts a token takes, in whole numbers."""
    counts = (config.experts, config.num_experts_per_tok, config.moe_intermediate_size or config.intermediate_size)
    if not all(type(count) is int and count > 0 for count in counts) or counts[1] > counts[0]:
        raise ModelError(f"{label} does not say how many experts there are, how wide, and how many a token takes")
    experts, active, width = counts
    return MixtureShape(replace(dense_of(config), mlp=width), experts, active)
