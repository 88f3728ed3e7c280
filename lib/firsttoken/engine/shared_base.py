"""A model and variants of it: LoRA fine-tunes that share its weights, so that a step takes the requests of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from firsttoken.engine.accelerator import Fused
from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.lora import Adapter, Slices, with_adapter
from firsttoken.engine.model_version import ModelVersion
from firsttoken.study.errors import StageError


def adapted_layers(layers: Sequence[nn.Module], adapter: Adapter, first: int = 0) -> list[nn.Module]:
    """``layers`` of a model, from the number ``first`` (0-based) on, with ``adapter``, of shared weights.

    Raises StageError for an adapter that does not fit, or that lacks a module which its configuration names.
    """
    if outside := sorted(number for number in adapter.layers if number >= first + len(layers)):
        raise StageError(
            f"adapter {adapter.name} is for layer {outside[-1]}, and this model has {len(layers)}; name one that was "
            "trained on it"
        )
    adapted = [
        _adapted(layer, adapter.layers[number], adapter.name) if number in adapter.layers else layer
        for number, layer in enumerate(layers, first)
    ]
    for number, layer in enumerate(layers, first):
        adapter.check_complete(layer, number)
    return adapted


def _adapted(layer: nn.Module, slices: Slices, name: str) -> nn.Module:
    if not isinstance(layer, Fused):
        return with_adapter(layer, slices)
    if (adapted := layer.with_adapter(slices)) is None:
        raise StageError(f"adapter {name} is on modules that a fused layer does not add up; host it before layers fuse")
    return adapted


class SharedBase(ModelVersion):
    """The model itself, by ``decoder``, and variants that have its weights; ``hidden_cache`` keeps hidden states of the
    requests of all."""

    def __init__(self, decoder: Decoder, hidden_cache: HiddenStateCache | None = None) -> None:
        super().__init__(decoder, hidden_cache, stage=1)
        self._variants: list[tuple[ModelVersion, Adapter]] = []

    def variant(self, model: nn.Module, adapter: Adapter) -> ModelVersion:
        """Return the version of ``model``, whose layers these are, with ``adapter``.

        Raises StageError where layers are borrowed, and for an adapter that does not fit.
        """
        segment, *others = self.decoder.segments
        if others or not isinstance(segment, LocalSegment):
            raise StageError("some layers of the variant's base are borrowed; host it once all of them are here")
        layers = adapted_layers(segment.modules, adapter)
        version = ModelVersion(Decoder(model, [LocalSegment(layers)]), self.hidden_cache, stage=1, base=self)
        self._variants.append((version, adapter))
        return version

    def fuse(self) -> Iterator[None]:
        """Fuse the layers as any version does, and give each at once to the variants, with their adapters."""
        return fuse_variants(self.decoder, super().fuse(), self._variants)


def fuse_variants(
    base: Decoder, fusing: Iterator[None], variants: Sequence[tuple[ModelVersion, Adapter]]
) -> Iterator[None]:
    (segment,) = base.segments
    for number, _ in enumerate(fusing):
        for version, adapter in variants:
            if number < len(segment.modules):
                replace_layer(version, number, segment.modules[number], adapter)
            else:
                version.decoder.share_head(base)
        yield


def replace_layer(version: ModelVersion, number: int, layer: nn.Module, adapter: Adapter) -> None:
    """Let ``version`` compute with ``layer`` and its adapter, where the kernels add that up."""
    (segment,) = version.decoder.segments
    slices = adapter.layers.get(number)
    if slices is None:
        segment.modules[number] = layer
    elif isinstance(layer, Fused) and (adapted := layer.with_adapter(slices)) is not None:
        segment.modules[number] = adapted
