"""The paper's three calls, with models: what comes out is what the core makes of the same cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from firsttoken.assets.models import load_model
from firsttoken.droidspeak import prefill
from firsttoken.droidspeak.forward import layer_kv
from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill, suffix_logits
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.droidspeak.store import KVStore
from firsttoken.study.errors import CacheError, RequestError

DEPTH = 6
CONTEXT = torch.randint(3, 256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
PREFIX = Prefix.of([CONTEXT])


def model(seed: int):
    loaded = load_model(f"random:tiny-{DEPTH}", seed=seed).model
    return loaded, identify(loaded, None, str(seed))


SENDER, SENDS = model(1)
RECEIVER, RECEIVES = model(2)
SENT = full_prefill(SENDER, PREFIX, range(DEPTH))


@pytest.fixture(params=["memory", "disk", "both"])
def store(request, tmp_path) -> KVStore:
    memory = 0 if request.param == "disk" else 1 << 24
    made = KVStore(None if request.param == "memory" else tmp_path, memory_bytes=memory, disk_bytes=1 << 24)
    made.store(CONTEXT, SENDS, SENT)
    return made


def layers(cache) -> Iterator[LayerKV]:
    return (layer_kv(cache, layer) for layer in range(DEPTH))


def same(one, other, atol: float = 0.0) -> bool:
    pairs = zip(layers(one), layers(other), strict=True)
    return all(torch.allclose(a, b, atol=atol, rtol=0) for kv in pairs for a, b in zip(*kv, strict=True))


@pytest.mark.parametrize("group", [Group(0, 0), Group(0, 2), Group(2, 5), Group(4, 6), Group(0, 6)], ids=str)
def test_partial_prefill_over_the_store_is_that_of_the_core(store, group):
    expected = prefill.partial_prefill(RECEIVER, PREFIX, SENT, group)
    found = store.partial_prefill(group, CONTEXT, receiver_model=RECEIVER, receiver=RECEIVES, sender=SENDS)
    assert same(found, expected)
    if len(group) < DEPTH:
        own = prefill.partial_prefill(RECEIVER, PREFIX, full_prefill(RECEIVER, PREFIX, range(DEPTH)), group)
        assert not same(found, own, atol=1e-3)


def test_what_is_not_stored_of_a_context_the_receiver_computes_itself(store):
    longer = [*CONTEXT[:40], *CONTEXT[:9]]
    assert store.match(longer, SENDS) == 32
    found = store.partial_prefill(Group(1, 3), longer, receiver_model=RECEIVER, receiver=RECEIVES, sender=SENDS)
    shared = Prefix.of([longer[:32]])
    expected = prefill.partial_prefill(RECEIVER, shared, full_prefill(SENDER, shared, [1]), Group(1, 3))
    suffix_logits(RECEIVER, shared, torch.tensor([longer[32:]]), expected)
    assert found.get_seq_length() == 49 and same(found, expected, atol=1e-5)


def test_only_the_reused_layers_and_the_lower_edge_are_read(tmp_path):
    store = KVStore(tmp_path, memory_bytes=0, disk_bytes=1 << 24)
    store.store(CONTEXT, SENDS, SENT)
    located, _ = store.locate(CONTEXT, SENDS)
    raw = bytearray(located.path.read_bytes())
    for name in ["layer.2", "layer.3", *(f"edge.{layer}" for layer in (0, 1, 3, 4, 5))]:
        raw[located.spans[name].offset] ^= 1
    located.path.write_bytes(raw)
    found = store.partial_prefill(Group(2, 4), CONTEXT, receiver_model=RECEIVER, receiver=RECEIVES, sender=SENDS)
    assert same(found, prefill.partial_prefill(RECEIVER, PREFIX, SENT, Group(2, 4)))
    with pytest.raises(CacheError, match="torn"):
        store.partial_prefill(Group(3, 4), CONTEXT, receiver_model=RECEIVER, receiver=RECEIVES, sender=SENDS)


def test_what_was_read_can_take_part_in_training(store):
    with torch.inference_mode():
        store.fetch(CONTEXT, SENDS, 0)
    keys, _ = store.fetch(CONTEXT, SENDS, 0)
    weight = torch.ones((), requires_grad=True)
    (weight * keys).sum().backward()
    assert torch.allclose(weight.grad, keys.sum())


def test_the_store_keeps_a_copy(store):
    mine = full_prefill(SENDER, Prefix.of([CONTEXT[:20]]), [1])
    kept = [tensor.clone() for tensor in (mine.kv[1].keys, mine.e_cache[1])]
    store.store(CONTEXT[:20], SENDS, mine)
    with torch.inference_mode():
        mine.kv[1].keys.zero_()
        mine.e_cache[1].zero_()
    assert torch.equal(store.fetch(CONTEXT[:20], SENDS, 1).keys, kept[0])
    assert torch.equal(store.fetch_e_cache(CONTEXT[:20], SENDS, 1), kept[1])


def test_of_two_that_hold_a_context_the_one_with_the_edge_is_used(store):
    longer = [*CONTEXT, *range(3, 30)]
    store.store(longer, SENDS, full_prefill(SENDER, Prefix.of([longer])))
    assert store.match(longer, SENDS) == 77 and store.match(longer, SENDS, e_cache_layer=2) == 48
    assert store.fetch_e_cache(longer, SENDS, 2).shape == (1, 48, 32)
    found = store.partial_prefill(Group(2, 4), longer, receiver_model=SENDER, receiver=SENDS, sender=SENDS)
    assert found.get_seq_length() == 77


def test_another_kind_of_model_is_refused_with_the_reason(store):
    other = replace(RECEIVES, dtype="bfloat16")
    with pytest.raises(CacheError, match="another dtype"):
        store.partial_prefill(Group(0, 2), CONTEXT, receiver_model=RECEIVER, receiver=other, sender=SENDS)
    with pytest.raises(CacheError, match=r"stored by .*another dtype"):
        store.fetch(CONTEXT, replace(SENDS, dtype="bfloat16"), 0)


def test_other_tokens_other_weights_and_a_missing_edge_are_refused_with_the_reason(store):
    with pytest.raises(CacheError, match=r"shares its first 16 tokens with this one; compute and store it"):
        store.fetch([CONTEXT[0] + 1, *CONTEXT[1:]], SENDS, 0)
    with pytest.raises(CacheError, match="other weights, so ask for it under its own identity"):
        store.fetch(CONTEXT, RECEIVES, 0)
    store.store(CONTEXT, SENDS, PrefixCache(SENT.kv, {1: SENT.e_cache[1], 4: SENT.e_cache[4]}))
    with pytest.raises(CacheError, match=r"no E-cache at layer 2 .*\(there: 1, 4\); store that edge too"):
        store.fetch_e_cache(CONTEXT, SENDS, 2)


@pytest.mark.parametrize(
    ("context", "cache", "message"),
    [
        (CONTEXT[:-1], SENT, r"keys of layer 0 are float32 \[1, 2, 50, 8\], but .* makes float32 \[1, 2, 49, 8\]"),
        (CONTEXT, PrefixCache(SENT.kv[:-1], {}), "the cache has 5 layers, .* has 6"),
        (CONTEXT, PrefixCache(SENT.kv, {6: SENT.e_cache[0]}), "layer 6 fits no model of 6 layers"),
        (CONTEXT, PrefixCache(SENT.kv, {1: SENT.e_cache[1][:, :9]}), r"E-cache at layer 1 are .*\[1, 9, 32\]"),
        (
            CONTEXT,
            PrefixCache((*SENT.kv[:-1], LayerKV(SENT.kv[5].keys, SENT.kv[5].values.bfloat16())), {}),
            r"values of layer 5 are bfloat16",
        ),
        (CONTEXT, full_prefill(SENDER, Prefix.of([CONTEXT, CONTEXT])), r"\[2, 2, 50, 8\]"),
    ],
    ids=["tokens", "layers", "edge", "edge tokens", "dtype", "batch"],
)
def test_a_cache_that_is_not_the_models_is_not_taken(store, context, cache, message):
    with pytest.raises(CacheError, match=message):
        store.store(context, SENDS, cache)
    assert len(store) == 1 and torch.equal(store.fetch(CONTEXT, SENDS, 5).values, SENT.kv[5].values)


def test_requests_that_make_no_sense(store):
    for call in (store.fetch, store.fetch_e_cache):
        with pytest.raises(RequestError, match="has layers 0 to 5, no layer 6"):
            call(CONTEXT, SENDS, 6)
    with pytest.raises(RequestError, match="empty context"):
        store.match([], SENDS)
    with pytest.raises(RequestError, match="does not fit 6 layers"):
        store.partial_prefill(Group(2, 7), CONTEXT, receiver_model=RECEIVER, receiver=RECEIVES, sender=SENDS)
    with pytest.raises(CacheError, match="give it a folder"):
        KVStore(None, memory_bytes=0).locate(CONTEXT, SENDS)
