"""The KV cache of a model in which layers pass (ProgressiveServe, 3.4.1; errata I10)."""

from __future__ import annotations

from transformers import DynamicCache


class GapCache(DynamicCache):
    """A KV cache in which any layer may be a gap, the first one included.

    transformers asks layer 0 how many tokens the cache holds. Where layer 0 is a a PassLayer it holds none,
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
