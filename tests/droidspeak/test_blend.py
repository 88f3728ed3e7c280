"""CacheBlend: which tokens are recomputed, and that they are recomputed right."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from heavy_models import heavy_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from firsttoken.droidspeak.blend import blended_cache, tokens_per_layer
from firsttoken.droidspeak.forward import Forward, layer_kv
from firsttoken.droidspeak.prefill import full_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix, PrefixCache
from firsttoken.study.errors import CacheError, ModelError, RequestError

DEPTH = 5
# no token twice: equal tokens deviate equally in layer 0, and which of them is chosen is then a matter of rounding
ROW = torch.randperm(256, generator=torch.Generator().manual_seed(3))[:40].tolist()


RECEIVER, SENDER = heavy_model(1, DEPTH), heavy_model(2, DEPTH)


def kv_of(cache, row=0, skip=0):
    """Keys and values of every layer of one row without its padding, [layers, 2, kv_heads, tokens, head_dim]."""
    pairs = cache.kv if isinstance(cache, PrefixCache) else [layer_kv(cache, i) for i in range(len(cache.layers))]
    return torch.stack([torch.stack([kv[0][row, :, skip:], kv[1][row, :, skip:]]) for kv in pairs])


def changed(cache, sent):
    """For each layer, the columns in which the cache is not the sender's."""
    differs = (kv_of(cache) != kv_of(sent)).any(-1).any(2).any(1)
    return [set(row.nonzero().flatten().tolist()) for row in differs]


class Held(DynamicLayer):
    """The oracle's cache layer: it is given every token, and keeps the sender's KV of those that are not chosen."""

    def __init__(self, kv, chosen):
        super().__init__()
        self.sent, self.chosen = kv, torch.tensor(sorted(chosen))

    def update(self, keys, values, *args, **kwargs):
        self.deviation = sum(((a - b) ** 2).sum((1, 3))[0] for a, b in zip((keys, values), self.sent, strict=True))
        self.keys, self.values = (kept.clone() for kept in self.sent)
        self.keys[:, :, self.chosen], self.values[:, :, self.chosen] = (
            keys[:, :, self.chosen],
            values[:, :, self.chosen],
        )
        return self.keys, self.values


def oracle(model, prefix, sent, counts):
    """The blend of one row without gathering: every token goes through every layer, the unchosen are then ignored."""
    forward, cache, chosen = Forward(model, prefix), DynamicCache(), set(range(prefix.tokens))
    hidden = forward.embed()
    for layer, count in enumerate(counts):
        if count < len(chosen):
            ranked = sorted(chosen, key=lambda column: -cache.layers[layer - 1].deviation[column])
            chosen = set(ranked[:count])
        cache.layers.append(Held(sent.kv[layer], chosen))
        hidden = forward.run(hidden, [layer], cache)
    return cache


@pytest.mark.parametrize(("kind", "rope"), [("llama", "default"), ("llama", "llama3"), ("qwen2", "default")])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("gradual", [False, True])
def test_share_one_is_full_prefill(kind, rope, attention, gradual):
    receiver, sender = (copy.deepcopy(heavy_model(seed, DEPTH, kind, rope)) for seed in (1, 2))
    for model in (receiver, sender):
        model.set_attn_implementation(attention)
    prefix = Prefix.of([ROW, ROW[:23]])
    own, sent = full_prefill(receiver, prefix), full_prefill(sender, prefix)
    blend = blended_cache(receiver, prefix, sent, 1.0, gradual)
    for row, skip in ((0, 0), (1, 17)):
        assert not torch.allclose(kv_of(sent, row, skip), kv_of(own, row, skip), atol=1)
        torch.testing.assert_close(kv_of(blend, row, skip), kv_of(own, row, skip), atol=1e-4, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(share=st.floats(0, 1), gradual=st.booleans(), whole=st.integers(1, DEPTH))
@example(share=2e-11, gradual=True, whole=1)  # less than a token
def test_a_receiver_that_is_the_sender_changes_nothing(share, gradual, whole):
    prefix = Prefix.of([ROW, ROW[:9]])
    sent = full_prefill(RECEIVER, prefix)
    blend = blended_cache(RECEIVER, prefix, sent, share, gradual, full_layers=whole)
    for row, skip in ((0, 0), (1, 31)):
        torch.testing.assert_close(kv_of(blend, row, skip), kv_of(sent, row, skip), atol=1e-4, rtol=1e-4)


def test_share_zero_is_the_senders_cache_above_the_first_layer():
    prefix = Prefix.of([ROW])
    own, sent = full_prefill(RECEIVER, prefix), full_prefill(SENDER, prefix)
    blend = kv_of(blended_cache(RECEIVER, prefix, sent, 0.0))
    assert torch.equal(blend[0], kv_of(own)[0]) and torch.equal(blend[1:], kv_of(sent)[1:])


def test_all_layers_whole_is_full_prefill():
    prefix = Prefix.of([ROW])
    blend = blended_cache(RECEIVER, prefix, full_prefill(SENDER, prefix), 0.15, full_layers=DEPTH)
    assert torch.equal(kv_of(blend), kv_of(full_prefill(RECEIVER, prefix)))


@pytest.mark.parametrize("gradual", [False, True])
@pytest.mark.parametrize("whole", [1, 2])
@pytest.mark.parametrize("share", [0.15, 0.4])
def test_equals_an_oracle_that_computes_every_token(share, gradual, whole):
    prefix = Prefix.of([ROW])
    sent = full_prefill(SENDER, prefix)
    counts = tokens_per_layer(len(ROW), DEPTH, share, gradual, whole)
    blend = blended_cache(RECEIVER, prefix, sent, share, gradual, full_layers=whole)
    expected = oracle(RECEIVER, prefix, sent, counts)
    assert changed(blend, sent) == changed(expected, sent)
    torch.testing.assert_close(kv_of(blend), kv_of(expected), atol=1e-4, rtol=1e-4)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    share=st.sampled_from([0.05, 0.15, 0.5, 0.9]),
    gradual=st.booleans(),
)
def test_a_padded_batch_equals_its_rows_alone(lengths, share, gradual):
    rows = [ROW[:length] for length in lengths]
    prefix = Prefix.of(rows)
    sent = full_prefill(SENDER, prefix)
    blend = blended_cache(RECEIVER, prefix, sent, share, gradual)
    assert torch.isfinite(kv_of(blend)).all()
    for index, row in enumerate(rows):
        alone, skip = Prefix.of([row]), prefix.tokens - len(row)
        expected = blended_cache(RECEIVER, alone, full_prefill(SENDER, alone), share, gradual)
        torch.testing.assert_close(kv_of(blend, index, skip), kv_of(expected), atol=1e-4, rtol=1e-4)
        above = slice(1, None)  # layer 0 is computed in full, padding with it
        assert torch.equal(kv_of(blend, index)[above, :, :, :skip], kv_of(sent, index)[above, :, :, :skip])


def test_what_was_sent_stays_as_it_is():
    prefix = Prefix.of([ROW])
    sent = full_prefill(SENDER, prefix)
    before = kv_of(sent)
    cache = blended_cache(RECEIVER, prefix, sent, 0.5)
    suffix_logits(RECEIVER, prefix, torch.tensor([[5]]), cache)
    assert torch.equal(kv_of(sent), before)
    assert all(type(layer) is DynamicLayer for layer in cache.layers)


def test_bfloat16():
    prefix = Prefix.of([ROW, ROW[:9]])
    receiver, sender = (copy.deepcopy(model).bfloat16() for model in (RECEIVER, SENDER))
    own = full_prefill(receiver, prefix)
    blend = kv_of(blended_cache(receiver, prefix, full_prefill(sender, prefix), 0.5))
    assert blend.dtype == torch.bfloat16 and blend.isfinite().all()
    whole = kv_of(blended_cache(receiver, prefix, full_prefill(sender, prefix), 1.0))
    assert (whole - kv_of(own)).float().norm() < 0.05 * kv_of(own).float().norm()


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(1, 4096),
    depth=st.integers(1, 40),
    share=st.just(0.0) | st.floats(1e-3, 1),
    gradual=st.booleans(),
    data=st.data(),
)
def test_plan_keeps_the_mean_share_and_never_grows(tokens, depth, share, gradual, data):
    whole = data.draw(st.integers(1, depth))
    plan = tokens_per_layer(tokens, depth, share, gradual, whole)
    rest = plan[whole:]
    assert len(plan) == depth and plan[:whole] == [tokens] * whole
    assert all(later <= earlier for earlier, later in pairwise(plan))
    if rest:
        assert -1e-6 <= sum(rest) / len(rest) - share * tokens < 1
        assert (min(rest) > 0) == (share > 0)


def test_plan_of_the_paper():
    assert tokens_per_layer(1000, 3) == [1000, 150, 150]
    assert tokens_per_layer(1000, 5, gradual=True) == [1000, 225, 175, 125, 75]
    assert tokens_per_layer(30, 2, 0.1) == [30, 3]


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan")])
def test_a_bad_share_is_refused(share):
    prefix = Prefix.of([ROW])
    with pytest.raises(RequestError, match="from 0 to 1"):
        blended_cache(RECEIVER, prefix, full_prefill(SENDER, prefix), share)


@pytest.mark.parametrize("whole", [0, DEPTH + 1])
def test_a_bad_number_of_whole_layers_is_refused(whole):
    prefix = Prefix.of([ROW])
    with pytest.raises(RequestError, match=f"1 to {DEPTH}"):
        blended_cache(RECEIVER, prefix, full_prefill(SENDER, prefix), full_layers=whole)


def test_a_cache_that_does_not_fit_is_refused():
    prefix = Prefix.of([ROW])
    sent = full_prefill(SENDER, prefix)
    with pytest.raises(CacheError, match=r"layer 0 of the cache is \[1, 2, 40, 8\].*computes \[1, 2, 12, 8\]"):
        blended_cache(RECEIVER, Prefix.of([ROW[:12]]), sent)


def test_layers_with_a_window_are_refused():
    model, prefix = heavy_model(1, 4, "gemma3"), Prefix.of([ROW])
    with pytest.raises(ModelError, match=r"^Gemma3ForCausalLM has layers with a window, which no blend has; reuse"):
        blended_cache(model, prefix, full_prefill(model, prefix))
