"""The dimensions of a mixture of experts, all that the time and the memory of a simulated step depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from firsttoken.assets.dense_shape import SHAPES, DenseShape, config_of, dense_of
from firsttoken.assets.model_config import CONFIG, ModelConfig
from firsttoken.study.errors import ModelError


@dataclass(frozen=True)
class MixtureShape:
    """A decoder ``dense`` whose MLP stands for one of ``experts``; each token takes ``active`` of these in a layer."""

    dense: DenseShape
    experts: int
    active: int

    @property
    def whole(self) -> DenseShape:
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
    if there := [name for name in _UNMEASURED if getattr(config, name)]:
        raise ModelError(f"{folder / CONFIG} has {there[0]}: no operators of such layers were measured")
    return _mixture_of(config, f"{folder / CONFIG}")


def _mixture_of(config: ModelConfig, where: str) -> MixtureShape:
    """Raises ModelError where the config does not say how many experts a token takes, in whole numbers."""
    counts = (config.experts, config.num_experts_per_tok, config.moe_intermediate_size or config.intermediate_size)
    if not all(type(count) is int and count > 0 for count in counts) or counts[1] > counts[0]:
        raise ModelError(f"{where} does not say how many experts there are, how wide, and how many a token takes")
    experts, active, width = counts
    return MixtureShape(replace(dense_of(config), mlp=width), experts, active)
