"""Any span of decoder layers of an unmodified Hugging Face model, run over a prefix or over what follows it.

A model's own ``forward`` starts at the embedding and ends at the last layer; partial prefill needs the middle. Layers,
rotary tables and mask are the model's own, so nothing here computes attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.model_config import FULL, SLIDING
from firsttoken.assets.positions import kinds_by_length
from firsttoken.assets.servable import attention_kinds, has_windows
from firsttoken.droidspeak.prefix import LayerKV, Prefix
from firsttoken.droidspeak.tensor_bytes import CachePiece
from firsttoken.study.errors import CacheError, ModelError

_MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}


class Forward:
    """``model`` over the last ``new`` tokens of ``prefix`` (default: all); the others are in the cache already.

    Mask and rotary tables are made once and serve every layer of their kind: Gemma-3 has layers with a window and
    layers without, and other angles in each. Raises ModelError for a model that ``check_supported`` refuses.
    """

    def __init__(self, model: PreTrainedModel, prefix: Prefix, new: int | None = None) -> None:
        check_supported(model)
        self.model, self.prefix = model, prefix
        self.new = prefix.tokens if new is None else new
        self._decoder = model.get_decoder()
        self._layers = layers_of(model)
        self._positions = prefix.positions[:, -self.new :]
        like = torch.empty(prefix.ids.shape[0], self.new, 1, dtype=model.dtype, device=prefix.ids.device)
        windows = has_windows(model.config)
        self._kinds = model.config.layer_types if windows else [FULL] * len(self._layers)
        self._layer_arguments = {
            kind: {
                "attention_mask": _MASKS[kind](
                    config=model.config,
                    inputs_embeds=like,
                    attention_mask=prefix.mask,
                    past_key_values=_cache_of_length(prefix.tokens - self.new),
                    position_ids=self._positions,
                ),
                "position_embeddings": self._decoder.rotary_emb(like, self._positions, *[kind] * windows),
            }
            for kind in set(self._kinds)
        }

    @property
    def depth(self) -> int:
        return len(self._layers)

    def embed(self) -> Tensor:
        """The hidden states that enter layer 0, [batch, new, hidden]."""
        return self.model.get_input_embeddings()(self.prefix.ids[:, -self.new :])

    def run(
        self,
        hidden: Tensor,
        layers: Iterable[int],
        cache: DynamicCache,
        before: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Take ``hidden`` [batch, new, hidden] through ``layers``, whose keys and values join those in ``cache``.

        ``before`` is called with each layer and what enters it: to keep the E-cache, or to wait for a transfer.
        """
        for index in layers:
            if before is not None:
                before(index, hidden)
            hidden = self._layers[index](
                hidden,
                position_ids=self._positions,
                past_key_values=cache,
                use_cache=True,
                **self._layer_arguments[self._kinds[index]],
            )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., vocabulary] of what left the last layer."""
        return self.model.get_output_embeddings()(self._decoder.norm(hidden))


def cache_of(kv: Iterable[LayerKV | None]) -> DynamicCache:
    """A cache whose layers hold ``kv`` in order, without a copy; None leaves a layer empty, to be filled by a run."""
    cache = DynamicCache()
    for index, layer in enumerate(kv):
        cache.layers.append(DynamicLayer())
        if layer is not None:
            fill(cache, index, layer)
    return cache


def fill(cache: DynamicCache, index: int, kv: LayerKV) -> None:
    """Put ``kv`` into layer ``index`` of ``cache``, without a copy."""
    layer = cache.layers[index]
    layer.lazy_initialization(kv.keys, kv.values)
    layer.keys, layer.values = kv


def layer_kv(cache: DynamicCache, index: int) -> LayerKV:
    """The keys and values that layer ``index`` of ``cache`` holds."""
    return LayerKV(cache.layers[index].keys, cache.layers[index].values)


def check_supported(model: PreTrainedModel) -> None:
    """Raise ModelError unless every layer of ``model`` attends to the whole prefix, or to a window as in Gemma-3, at
    fixed rotary angles."""
    if kinds := attention_kinds(model.config) - {FULL, *([SLIDING] if has_windows(model.config) else [])}:
        raise ModelError(f"{type(model).__name__} has {', '.join(kinds)} layers; full attention only, or Gemma-3's")
    if kinds := kinds_by_length(model.config):
        raise ModelError(
            f"rope type {kinds[0]!r} turns keys by the length seen so far, so they cannot be reused; "
            "set a fixed scaling (linear, llama3, yarn)"
        )


def check_shape(model: PreTrainedModel, name: str, part: Tensor | CachePiece, wanted: tuple[int, ...]) -> None:
    """Raise CacheError unless ``part`` of a cache, called ``name``, is ``wanted`` in the dtype of ``model``."""
    if tuple(part.shape) != wanted or part.dtype != model.dtype:
        raise CacheError(
            f"{name} is {list(part.shape)} of {part.dtype}, {type(model).__name__} computes {list(wanted)} of "
            f"{model.dtype} for this prefix; it belongs to another model or prefix"
        )


def _cache_of_length(tokens: int) -> DynamicCache | None:
    """Return a cache of one layer of ``tokens`` tokens, which the mask asks for that number.

    Not the cache that is computed on: in that one some layers hold the prefix already while others are about to, and
    transformers would count the prefix twice.
    """
    if not tokens:
        return None
    placeholder = DynamicCache()
    placeholder.update(torch.empty(1, 1, tokens, 1), torch.empty(1, 1, tokens, 1), 0)
    return placeholder
