"""What hints, before an answer is given, that a reused cache spoils it: one number a request, larger is worse.

The first two are free, because they read the logits that there are anyway. The other two have the receiver compute a
few tokens itself (report 004, "next steps": partial recomputation of about 64 tokens as a gate for quality), at
``tokens`` / prefix of a full prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from firsttoken.droidspeak.forward import cache_of, layer_kv
from firsttoken.droidspeak.prefill import full_prefill, suffix_logits
from firsttoken.droidspeak.prefix import LayerKV, Prefix
from firsttoken.study.errors import RequestError

TOKENS = 64


def answer_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats, [batch], of next-token ``logits`` [batch, tokens, vocabulary], the mean over the tokens."""
    log = logits.float().log_softmax(-1)
    return -(log.exp() * log).sum(-1).mean(-1)


def answer_doubt(logits: Tensor) -> Tensor:
    """1 minus the margin between the two likeliest tokens, [batch] in 0..1, the mean over the tokens of ``logits``.

    ``logits`` are [batch, tokens, vocabulary].
    """
    best = logits.float().softmax(-1).topk(2, -1).values
    return (1 - (best[..., 0] - best[..., 1])).mean(-1)


@torch.inference_mode()
def head_deviation(model: PreTrainedModel, prefix: Prefix, cache: DynamicCache, tokens: int = TOKENS) -> Tensor:
    """Return the relative distance of ``cache`` from the receiver's own prefill of the first ``tokens`` of each row,
    [batch].

    The first tokens see nothing but one another, so their own prefill is exact. Norm of the difference over norm of the
    receiver's own, the mean over keys, values and all layers: a recomputed layer deviates too, because it started from
    the sender's hidden states. Raises RequestError unless every row has ``tokens``.
    """
    lengths = _lengths(prefix, tokens)
    columns = (prefix.tokens - lengths)[:, None] + torch.arange(tokens, device=prefix.ids.device)
    alone = full_prefill(model, Prefix(prefix.ids.gather(1, columns))).kv
    relative = []
    for index, recomputed in enumerate(alone):
        for exact, mixed in zip(recomputed, layer_kv(cache, index), strict=True):
            held = mixed.gather(2, columns[:, None, :, None].expand_as(exact))
            relative.append((held - exact).float().flatten(1).norm(dim=1) / exact.float().flatten(1).norm(dim=1))
    return torch.stack(relative).mean(0)


@torch.inference_mode()
def tail_divergence(
    model: PreTrainedModel,
    prefix: Prefix,
    cache: DynamicCache,
    suffix: Tensor,
    logits: Tensor,
    tokens: int = TOKENS,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the change of the first answer token once the receiver has read the last ``tokens`` of the prefix itself,
    [batch].

    Those tokens and ``suffix`` [batch, suffix] (``mask`` 0 on its right padding) go through all layers over what
    ``cache`` holds of the tokens before them. Compared with ``logits`` [batch, vocabulary], the first answer token's
    over the whole cache, by the symmetric Kullback-Leibler divergence in nats. ``cache`` may hold the suffix already,
    and is left as it is. With all tokens it measures against full prefill. Raises RequestError unless every row has
    ``tokens``.
    """
    _lengths(prefix, tokens)
    head_tokens = prefix.tokens - tokens
    head = Prefix(prefix.ids[:, :head_tokens], None if prefix.mask is None else prefix.mask[:, :head_tokens])
    short = cache_of(
        LayerKV(kv.keys[:, :, :head_tokens], kv.values[:, :, :head_tokens])
        for kv in (layer_kv(cache, index) for index in range(len(cache.layers)))
    )
    again = torch.cat([prefix.ids[:, head_tokens:], suffix], 1)
    tail_mask = None if mask is None else torch.cat([torch.ones_like(prefix.ids[:, head_tokens:]), mask], 1)
    reread = suffix_logits(model, head, again, short, tail_mask, keep=suffix.shape[1])
    last = torch.full_like(suffix[:, 0], suffix.shape[1] - 1) if mask is None else mask.sum(1) - 1
    log_probs = reread[torch.arange(len(last), device=last.device), last].float().log_softmax(-1)
    mixed = logits.float().log_softmax(-1)
    return ((log_probs.exp() - mixed.exp()) * (log_probs - mixed)).sum(-1)


def _lengths(prefix: Prefix, tokens: int) -> Tensor:
    """Real tokens of each row, [batch]. Raises RequestError unless ``tokens`` is 1 to the least of them."""
    lengths = (torch.ones_like(prefix.ids) if prefix.mask is None else prefix.mask).sum(1)
    shortest = int(lengths.min())
    if not 1 <= tokens <= shortest:
        raise RequestError(f"cannot probe {tokens} tokens; the shortest prefix has {shortest}: give 1 to {shortest}")
    return lengths
