"""PassLayer: what stands where a decoder layer has not arrived yet (ProgressiveServe, 3.4.1).

The report's ``return x`` hides two contracts of a decoder layer (errata I10): its return type, a tensor since
transformers 5, and the KV cache, in which a layer that passes leaves a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from firsttoken.assets.models import layers_of
from firsttoken.study.errors import StageError


class PassLayer(nn.Module):
    """A decoder layer that returns its input: no weights, no attention, no entry in the KV cache."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return ``hidden_states`` [batch, tokens, hidden] unchanged."""
        return hidden_states


class GapCache(DynamicCache):
    """A KV cache in which any layer may be a gap, the first one included.

    transformers asks layer 0 how many tokens the cache holds. Where layer 0 is a :class:`PassLayer` it holds none,
    positions and mask come out as for an empty cache, and every decode step is silently wrong. Here the first layer
    that holds tokens answers.
    """

    def _witness(self, layer_idx: int) -> int:
        filled = (i for i in range(len(self.layers)) if super(GapCache, self).get_seq_length(i) > 0)
        if layer_idx < len(self.layers) and super().get_seq_length(layer_idx) > 0:
            return layer_idx
        return next(filled, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, answered by the first filled layer when ``layer_idx`` is a gap."""
        return super().get_seq_length(self._witness(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover, answered as in :meth:`get_seq_length`."""
        return super().get_mask_sizes(query_length, self._witness(layer_idx))


def pass_layers(model: nn.Module, indices: Iterable[int]) -> dict[int, nn.Module]:
    """Put a :class:`PassLayer` at each of ``indices`` (0-based) and return the layers that stood there.

    Raises StageError for an index that the model does not have, before anything is replaced.
    """
    layers = layers_of(model)
    wanted = sorted(set(indices))
    if wanted and not 0 <= wanted[0] <= wanted[-1] < len(layers):
        raise StageError(f"layers {wanted} do not fit a model of {len(layers)} layers (0-based 0-{len(layers) - 1})")
    removed = {i: layers[i] for i in wanted}
    for i in wanted:
        layers[i] = PassLayer()
    return removed


def restore_layers(model: nn.Module, removed: Mapping[int, nn.Module]) -> None:
    """Put real layers back where :func:`pass_layers` took them from."""
    layers = layers_of(model)
    for i, layer in removed.items():
        layers[i] = layer
