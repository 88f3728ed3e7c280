"""Partial prefill: recompute one contiguous group of layers, reuse the sender's KV in the others (DroidSpeak, 4.1).

The group starts from the E-cache, the hidden states that entered its lowest layer in the sender; what leaves its
highest layer is thrown away, because the layer above uses the sender's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from firsttoken.droidspeak.forward import Forward, cache_of, check_shape, layer_kv
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefix import Prefix, PrefixCache
from firsttoken.engine.kv import KVShape
from firsttoken.study.errors import CacheError, RequestError

PartialPrefill: TypeAlias = Callable[[PreTrainedModel, Prefix, PrefixCache, Group], DynamicCache]
"""What makes the receiver's cache of a prefix from the sender's, with the group computed again."""


@torch.inference_mode()
def full_prefill(model: PreTrainedModel, prefix: Prefix, edges: Iterable[int] = ()) -> PrefixCache:
    """Compute the cache of ``model`` for ``prefix``, with the E-cache at each of ``edges`` (layers, 0-based).

    Raises RequestError for an edge that the model does not have.
    """
    forward, states = Forward(model, prefix), {}
    wanted = set(edges)
    if wanted and not 0 <= min(wanted) <= max(wanted) < forward.depth:
        raise RequestError(f"no E-caches at layers {sorted(wanted)} of {forward.depth}; name its own")

    def keep(layer: int, hidden: Tensor) -> None:
        if layer in wanted:
            states[layer] = hidden

    cache = cache_of([None] * forward.depth)
    forward.run(forward.embed(), range(forward.depth), cache, keep)
    return PrefixCache(tuple(layer_kv(cache, i) for i in range(forward.depth)), states)


@torch.inference_mode()
def partial_prefill(model: PreTrainedModel, prefix: Prefix, sent: PrefixCache, group: Group) -> DynamicCache:
    """The receiver's cache for ``prefix``: its own keys and values in ``group``, the sender's in the other layers.

    Raises RequestError when the group does not fit the model, or when ``sent`` lacks the E-cache at its lower edge, and
    CacheError when what is used of ``sent`` is not of this model's shape and dtype, or of other tokens.
    """
    forward = Forward(model, prefix)
    check_fit(sent, forward, group.check(forward.depth))
    cache = cache_of(None if layer in group else kv for layer, kv in enumerate(sent.kv))
    if len(group):
        forward.run(group_input(forward, sent, group), group.layers, cache)
    return cache


def group_input(forward: Forward, sent: PrefixCache, group: Group) -> Tensor:
    """Return the hidden states that enter the lowest layer of ``group``: the sender's E-cache, or at layer 0 the
    receiver's own embedding."""
    if not group.needs_e_cache:
        return forward.embed()
    if group.lo not in sent.e_cache:
        held = ", ".join(map(str, sorted(sent.e_cache))) or "none"
        raise RequestError(f"no E-cache at layer {group.lo} was stored (there: {held}); store that edge too")
    return sent.e_cache[group.lo]


def check_fit(sent: PrefixCache, forward: Forward, group: Group) -> None:
    """Raise CacheError for the first part of ``sent``, of what ``group`` leaves in use, that ``forward`` cannot use."""
    if len(sent.kv) != forward.depth:
        raise CacheError(f"the cache has {len(sent.kv)} layers, the model {forward.depth}; it belongs to another model")
    model, (batch, tokens) = forward.model, forward.prefix.ids.shape
    shape = KVShape.of(model.config, model.dtype)
    for layer, kv in enumerate(sent.kv):
        for half in kv if layer not in group else ():
            check_shape(model, f"layer {layer} of the cache", half, (batch, shape.kv_heads, tokens, shape.head_dim))
    if group.needs_e_cache and group.lo in sent.e_cache:
        wanted = (batch, tokens, model.config.hidden_size)
        check_shape(model, f"the E-cache at layer {group.lo} of the cache", sent.e_cache[group.lo], wanted)


def spans(layers: Iterable[int]) -> list[Group]:
    """The contiguous groups that a scattered set of ``layers`` falls into, in order; each begins with a transition."""
    groups: list[Group] = []
    for layer in sorted(set(layers)):
        if groups and groups[-1].hi == layer:
            groups[-1] = Group(groups[-1].lo, layer + 1)
        else:
            groups.append(Group(layer, layer + 1))
    return groups


@torch.inference_mode()
def suffix_logits(model: PreTrainedModel, prefix: Prefix, ids: Tensor, cache: DynamicCache, keep: int = 0) -> Tensor:
    """Next-token logits [batch, keep or suffix, vocabulary] behind the last ``keep`` (0: all) tokens of ``ids``.

    ``ids`` [batch, suffix] follow ``prefix``, whose layers ``cache`` holds; their own keys and values join it.
    """
    forward = Forward(model, prefix.followed_by(ids), new=ids.shape[1])
    hidden = forward.run(forward.embed(), range(forward.depth), cache)
    return forward.logits(hidden[:, -keep:])
