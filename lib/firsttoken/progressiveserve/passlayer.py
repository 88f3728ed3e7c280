"""PassLayer: what stands where a decoder layer has not arrived yet (ProgressiveServe, 3.4.1).

The report's ``return x`` hides two contracts of a decoder layer (errata I10): its return type, a tensor since
transformers 5, and the KV cache, in which a layer that passes leaves a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.study.errors import StageError


class PassLayer(nn.Module):
    """A decoder layer that returns its input: no weights, no attention, no entry in the KV cache."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return ``hidden_states`` [batch, tokens, hidden] unchanged."""
        return hidden_states


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
