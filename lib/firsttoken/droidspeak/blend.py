"""CacheBlend across models: the sender's KV cache, with the tokens that deviate most recomputed.

arXiv 2405.16444, 4.3; the baseline of DroidSpeak, 5.1. All tokens go through the first layer; those whose keys and
values there differ most from the sender's go on through the rest. Between two models the first layer already differs,
yet its keys and values depend on the weights and the token alone: equal tokens tie, and what they mean in their context
does not count. ``full_layers=2`` has the second layer choose, the first that sees context, at the price of computing it
in full. A receiver whose first layer is the sender's own needs that: nothing deviates there, and the choice is
arbitrary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.servable import has_windows
from firsttoken.droidspeak.forward import Forward, cache_of, layer_kv
from firsttoken.droidspeak.layer_group import NOTHING
from firsttoken.droidspeak.prefill import check_fit
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.study.errors import ModelError, RequestError

SHARE = 0.15  # CacheBlend, 5.1
_WIDEST = 1.5  # gradual filter: first share over mean share; the paper says "slightly higher" and gives no number


@torch.inference_mode()
def blended_cache(
    model: PreTrainedModel,
    prefix: Prefix,
    sent: PrefixCache,
    share: float = SHARE,
    gradual: bool = False,
    *,
    full_layers: int = 1,
) -> DynamicCache:
    """The sender's keys and values with those of the most deviating ``share`` of tokens replaced by the receiver's.

    The lowest ``full_layers`` layers are computed for all tokens, and the last of them chooses: once for all layers
    above, or with ``gradual`` again in every layer among the tokens still computed, so that fewer go on
    (``tokens_per_layer``). Padding is never chosen. ``sent`` is left as it is. Raises RequestError for a share outside
    [0, 1] or ``full_layers`` outside 1..depth, CacheError for a cache that does not fit the prefix or the model, and
    ModelError for layers with a window.
    """
    forward = Forward(model, prefix)
    if has_windows(model.config):
        raise ModelError(f"{type(model).__name__} has layers with a window, which no blend has; reuse whole layers")
    check_fit(sent, forward, NOTHING)
    real = torch.ones_like(prefix.ids, dtype=torch.bool) if prefix.mask is None else prefix.mask.bool()
    plans = [tokens_per_layer(int(n), forward.depth, share, gradual, full_layers) for n in real.sum(1)]
    counts = torch.tensor(plans)  # stays on the CPU: on a GPU every look at it would wait for the layers before
    cache = cache_of(None if layer < full_layers else kv for layer, kv in enumerate(sent.kv))
    hidden = forward.run(forward.embed(), range(full_layers), cache)
    if full_layers == forward.depth or not counts[:, full_layers].any():
        return cache
    deviation = _deviation(layer_kv(cache, full_layers - 1), sent.kv[full_layers - 1])
    chosen = _ChosenTokens(prefix, real, hidden).select(deviation, counts[:, full_layers])
    layers, rotary = layers_of(model), model.get_decoder().rotary_emb
    arguments = chosen.layer_arguments(rotary)
    for index in range(full_layers, forward.depth):
        scattered = cache.layers[index] = _PatchedLayer(sent.kv[index], chosen)
        chosen.hidden = layers[index](chosen.hidden, past_key_values=cache, use_cache=True, **arguments)
        if index + 1 < forward.depth and (counts[:, index + 1] < counts[:, index]).any():
            chosen = chosen.select(scattered.deviation, counts[:, index + 1])
            arguments = chosen.layer_arguments(rotary)
    return cache_of(layer_kv(cache, index) for index in range(forward.depth))


def tokens_per_layer(
    tokens: int, depth: int, share: float = SHARE, gradual: bool = False, full_layers: int = 1
) -> list[int]:
    """Return the number of ``tokens`` that a blend computes in each of ``depth`` layers; the sum over tokens * depth is
    its compute.

    With ``gradual`` the share falls in a line from 1.5 times ``share`` (at most 1) so that its mean stays ``share``.
    Counts are rounded up, so that a share above 0 always computes a token. Raises RequestError as ``blended_cache``.
    """
    if not 0 <= share <= 1:
        raise RequestError(f"cannot recompute a share of {share} of the tokens; give one from 0 to 1")
    if not 1 <= full_layers <= depth:
        raise RequestError(f"cannot compute {full_layers} of {depth} layers for all tokens; give 1 to {depth}")
    rest, first = depth - full_layers, min(1.0, _WIDEST * share) if gradual else share
    fall = 2 * (first - share) / (rest - 1) if rest > 1 else 0.0
    if rest == 1:
        first = share
    # 0.1 * 30 is a little more than 3 in floating point, and should be 3
    counts = (math.ceil((first - fall * i) * tokens - 1e-9) for i in range(rest))
    return [tokens] * full_layers + [max(count, int(share > 0)) for count in counts]


class _ChosenTokens:
    """The tokens that are still computed: their ``columns`` [batch, slots] and ``hidden`` [batch, slots, hidden].

    Rows of unequal length choose unequal numbers of tokens. Where a row has fewer than the batch has slots, the rest
    are not ``valid`` [batch, slots]: they are computed, but reach neither the cache nor another token.
    """

    def __init__(self, prefix: Prefix, real: Tensor, hidden: Tensor) -> None:
        self._prefix, self._real = prefix, real
        self.columns = torch.arange(prefix.tokens, device=real.device).expand_as(real)
        self.valid, self.hidden = real, hidden

    def select(self, deviation: Tensor, counts: Tensor) -> _ChosenTokens:
        """The ``counts`` [batch] valid tokens of each row that have the largest ``deviation`` [batch, slots]."""
        slots = int(counts.max())
        order = deviation.masked_fill(~self.valid, -1).topk(slots, 1).indices
        hidden = self.hidden.gather(1, order[..., None].expand(-1, -1, self.hidden.shape[-1]))
        fewer = _ChosenTokens(self._prefix, self._real, hidden)
        fewer.columns = self.columns.gather(1, order)
        fewer.valid = (torch.arange(slots) < counts[:, None]).to(order.device)
        return fewer

    def layer_arguments(self, rotary: nn.Module) -> dict[str, Any]:
        """Return a decoder layer's arguments besides the hidden states: mask and rotary tables of the chosen tokens.

        A token always attends to itself: a slot on padding would otherwise attend to nothing, and its NaN would spoil
        the row. The mask [batch, 1, slots, tokens] is added to the scores, which sdpa and eager attention both take.
        """
        keys = torch.arange(self._prefix.tokens, device=self.columns.device)
        queries = self.columns[..., None]
        barred = ((keys > queries) | ~self._real[:, None]) & (keys != queries)
        dtype = self.hidden.dtype
        mask = torch.zeros_like(barred, dtype=dtype).masked_fill(barred, torch.finfo(dtype).min)
        rope = rotary(self.hidden, position_ids=self._prefix.positions.gather(1, self.columns))
        return {"attention_mask": mask[:, None], "position_embeddings": rope}


class _PatchedLayer(DynamicLayer):
    """A layer of the sender's cache into which the chosen tokens' new keys and values are put where the old ones were.

    Attention sees the mended layer. ``deviation`` [batch, slots] is how far the new ones were from the old.
    """

    def __init__(self, kv: LayerKV, chosen: _ChosenTokens) -> None:
        super().__init__()
        self.lazy_initialization(kv.keys, kv.values)
        self.keys, self.values = kv
        self._chosen = chosen

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> LayerKV:
        """The layer's keys and values [batch, kv_heads, tokens, head_dim] with the chosen tokens' in their places."""
        index = self._chosen.columns[:, None, :, None].expand_as(key_states)
        valid = self._chosen.valid[:, None, :, None]
        old, new = LayerKV(self.keys.gather(2, index), self.values.gather(2, index)), LayerKV(key_states, value_states)
        self.deviation = _deviation(new, old)
        # out of place: these tensors are the sender's, and may be in a store
        self.keys = self.keys.scatter(2, index, torch.where(valid, new.keys, old.keys))
        self.values = self.values.scatter(2, index, torch.where(valid, new.values, old.values))
        return LayerKV(self.keys, self.values)


def _deviation(recomputed: LayerKV, sent: LayerKV) -> Tensor:
    """Squared distance of each token's keys and values from the sender's, [batch, tokens], in float32."""
    return sum(
        (recomputed_half.float() - theirs.float()).square().sum((1, 3))
        for recomputed_half, theirs in zip(recomputed, sent, strict=True)
    )
