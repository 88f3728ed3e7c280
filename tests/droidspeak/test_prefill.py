"""Partial prefill against the model's own forward, which knows nothing of prefixes, edges or groups."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.mistral import MistralForCausalLM

from firsttoken.droidspeak import forward
from firsttoken.droidspeak.forward import Forward, cache_of, check_supported, layer_kv
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, spans, suffix_logits
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.study.errors import CacheError, ModelError, RequestError

DEPTH = 4
KINDS = [("llama", "default"), ("llama", "linear"), ("llama", "llama3"), ("llama", "yarn"), ("qwen2", "default")]
KINDS += [("gemma3", "default")]
GROUPS = [Group(lo, hi) for lo in range(DEPTH) for hi in range(lo + 1, DEPTH + 1)]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # fp32: sums over a batch, or over padding, run in another order


def rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 256, (length,), generator=draw).tolist() for length in lengths]


PREFIX, SUFFIX = Prefix.of(rows(70, 70)), torch.tensor(rows(5, 5, seed=1))


@pytest.fixture(params=KINDS, ids=" ".join)
def models(request, tiny) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Receiver and sender."""
    kind, rope = request.param
    return tiny(1, DEPTH, kind, rope), tiny(2, DEPTH, kind, rope)


@pytest.fixture(scope="module")
def receiver(tiny) -> PreTrainedModel:
    return tiny(1, DEPTH)


@pytest.fixture(scope="module")
def sender(tiny) -> PreTrainedModel:
    return tiny(2, DEPTH)


@pytest.fixture(scope="module")
def sent(sender) -> PrefixCache:
    return full_prefill(sender, PREFIX, range(DEPTH))


@torch.inference_mode()
def plain(model: PreTrainedModel, prefix: Prefix, hidden: bool = False) -> tuple[DynamicCache, tuple[Tensor, ...]]:
    """What ``generate`` would compute for a prefix: the cache, and what enters each layer."""
    cache = DynamicCache()
    positions = None if prefix.mask is None else prefix.positions
    out = model(
        prefix.ids,
        attention_mask=prefix.mask,
        position_ids=positions,
        past_key_values=cache,
        output_hidden_states=hidden,
    )
    return cache, out.hidden_states


@torch.inference_mode()
def plain_suffix(model: PreTrainedModel, cache: DynamicCache, ids: Tensor) -> Tensor:
    return model(ids, past_key_values=cache).logits


def from_layer(model: PreTrainedModel, prefix: Prefix, lo: int, hidden: Tensor) -> DynamicCache:
    """The cache of a plain pass in which ``hidden`` is put in at layer ``lo``: right from ``lo`` on."""
    hook = model.model.layers[lo].register_forward_pre_hook(lambda _, args: (hidden, *args[1:]))
    try:
        return plain(model, prefix)[0]
    finally:
        hook.remove()


def same(cache: DynamicCache, other: DynamicCache, layers=range(DEPTH)) -> bool:
    return all(
        torch.equal(a, b)
        for layer in layers
        for a, b in zip(layer_kv(cache, layer), layer_kv(other, layer), strict=True)
    )


def test_a_full_prefill_is_the_model_s_own_bit_by_bit(models):
    model, _ = models
    cache, hidden = plain(model, PREFIX, hidden=True)
    full = full_prefill(model, PREFIX, range(DEPTH))
    assert same(cache_of(full.kv), cache)
    assert sorted(full.e_cache) == list(range(DEPTH))
    assert all(torch.equal(full.e_cache[layer], hidden[layer]) for layer in range(DEPTH))


def test_recomputing_all_is_a_full_prefill_of_the_receiver(models):
    receiver, sender = models
    sent = full_prefill(sender, PREFIX, range(DEPTH))
    mine = partial_prefill(receiver, PREFIX, sent, Group(0, DEPTH))
    cache, _ = plain(receiver, PREFIX)
    assert same(mine, cache)
    logits = suffix_logits(receiver, PREFIX, SUFFIX, mine)
    assert torch.equal(logits, plain_suffix(receiver, cache, SUFFIX))
    with torch.inference_mode():
        whole = receiver(torch.cat([PREFIX.ids, SUFFIX], 1)).logits[:, PREFIX.tokens :]
    torch.testing.assert_close(logits, whole, **CLOSE)


def test_recomputing_nothing_is_full_reuse(models):
    receiver, sender = models
    sent = full_prefill(sender, PREFIX)
    cache = partial_prefill(receiver, PREFIX, sent, NOTHING)
    assert all(layer_kv(cache, i).keys is sent.kv[i].keys for i in range(DEPTH)), "nothing is copied"
    reused, _ = plain(sender, PREFIX)
    logits = suffix_logits(receiver, PREFIX, SUFFIX, cache)
    assert torch.equal(logits, plain_suffix(receiver, reused, SUFFIX))
    own = plain_suffix(receiver, plain(receiver, PREFIX)[0], SUFFIX)
    assert (logits - own).abs().mean() > 0.05 * own.abs().mean(), "another model's cache must show"


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_group_is_what_the_receiver_makes_of_the_sender_s_hidden_states(receiver, sender, sent, group):
    cache = partial_prefill(receiver, PREFIX, sent, group)
    hidden = sent.e_cache[group.lo] if group.lo else receiver.model.embed_tokens(PREFIX.ids)
    assert same(cache, from_layer(receiver, PREFIX, group.lo, hidden), group.layers)
    assert same(cache, cache_of(sent.kv), set(range(DEPTH)) - set(group.layers))
    assert not same(cache, plain(receiver, PREFIX)[0]) or group == Group(0, DEPTH)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("group", [NOTHING, *GROUPS], ids=str)
def test_a_model_reuses_its_own_cache_bit_by_bit(tiny, group, kind):
    """Gemma 3 has layers with a window, which is shorter than the prefix, and layers without."""
    model = tiny(1, DEPTH, kind)
    own = full_prefill(model, PREFIX, range(DEPTH))
    cache = partial_prefill(model, PREFIX, own, group)
    assert same(cache, cache_of(own.kv)) and same(cache, plain(model, PREFIX)[0])
    with torch.inference_mode():
        whole = model(torch.cat([PREFIX.ids, SUFFIX], 1)).logits[:, PREFIX.tokens :]
    torch.testing.assert_close(suffix_logits(model, PREFIX, SUFFIX, cache), whole, **CLOSE)


def test_gemma_3_hangs_on_its_windows_and_on_both_rotary_bases(tiny, monkeypatch):
    """The control of what is held to the bit: without one of them the cache is another."""
    model = tiny(1, DEPTH, "gemma3")
    own = cache_of(full_prefill(model, PREFIX).kv)
    alike = copy.deepcopy(model)
    alike.config.layer_types = ["sliding_attention"] * DEPTH
    assert not same(cache_of(full_prefill(alike, PREFIX).kv), own)
    monkeypatch.setitem(forward._MASKS, "sliding_attention", create_causal_mask)
    assert not same(cache_of(full_prefill(model, PREFIX).kv), own)


def test_scaled_rope_turns_the_keys(tiny):
    keys = [full_prefill(tiny(1, DEPTH, "llama", rope), PREFIX).kv[0].keys for rope in ("default", "linear", "llama3")]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (keys[i] - keys[j]).abs().max() > 0.1
    assert torch.equal(keys[0][:, :, 0], keys[1][:, :, 0]), "the first position is not turned"


LENGTHS = [70, 33, 51, 1]


@pytest.mark.parametrize("group", [NOTHING, Group(0, 2), Group(1, 3), Group(0, DEPTH)], ids=str)
def test_a_padded_batch_equals_its_rows_alone(models, group):
    receiver, sender = models
    prefixes, suffixes = rows(*LENGTHS), torch.tensor(rows(7, 7, 7, 7, seed=1))
    padded = Prefix.of(prefixes)
    cache = partial_prefill(receiver, padded, full_prefill(sender, padded, range(DEPTH)), group)
    logits = suffix_logits(receiver, padded, suffixes, cache)
    for i, (row, after) in enumerate(zip(prefixes, suffixes, strict=True)):
        alone = Prefix.of([row])
        cache = partial_prefill(receiver, alone, full_prefill(sender, alone, range(DEPTH)), group)
        expected = suffix_logits(receiver, alone, after[None], cache)
        torch.testing.assert_close(logits[i : i + 1], expected, **CLOSE)


def test_what_was_sent_stays_as_it_is(receiver, sender, sent):
    before = [(kv.keys.clone(), kv.values.clone()) for kv in sent.kv]
    edges = {layer: hidden.clone() for layer, hidden in sent.e_cache.items()}
    for group in (NOTHING, Group(1, 3)):
        suffix_logits(receiver, PREFIX, SUFFIX, partial_prefill(receiver, PREFIX, sent, group))
    assert all(torch.equal(a, b) for kv, old in zip(sent.kv, before, strict=True) for a, b in zip(kv, old, strict=True))
    assert all(torch.equal(sent.e_cache[layer], hidden) for layer, hidden in edges.items())


def test_bfloat16_too(receiver, sender):
    low = [copy.deepcopy(model).to(torch.bfloat16) for model in (receiver, sender)]
    cache = partial_prefill(low[0], PREFIX, full_prefill(low[1], PREFIX), Group(0, DEPTH))
    own, _ = plain(low[0], PREFIX)
    assert same(cache, own) and layer_kv(cache, 0).keys.dtype == torch.bfloat16


@pytest.mark.parametrize("group", [Group(-1, 2), Group(3, 2), Group(2, DEPTH + 1), Group(DEPTH + 1, DEPTH + 1)])
def test_a_group_out_of_range_is_refused(receiver, sent, group):
    with pytest.raises(RequestError, match=rf"group \[{group.lo}, {group.hi}\) does not fit {DEPTH} layers; 0 <= lo"):
        partial_prefill(receiver, PREFIX, sent, group)


def test_a_missing_edge_is_refused(receiver, sent):
    few = replace(sent, e_cache={1: sent.e_cache[1]})
    with pytest.raises(RequestError, match=r"no E-cache at layer 2 was stored \(there: 1\); store that edge too"):
        partial_prefill(receiver, PREFIX, few, Group(2, 3))
    with pytest.raises(RequestError, match=r"\(there: none\)"):
        partial_prefill(receiver, PREFIX, replace(sent, e_cache={}), Group(2, 3))
    partial_prefill(receiver, PREFIX, replace(sent, e_cache={}), Group(0, 3))


@pytest.mark.parametrize("edges", [[-1], [DEPTH], [0, 9]])
def test_edges_that_no_layer_has_are_refused(sender, edges):
    with pytest.raises(RequestError, match=rf"no E-caches at layers .* of {DEPTH}"):
        full_prefill(sender, PREFIX, edges)


ODD = {
    "one token less": (lambda kv: LayerKV(kv.keys[:, :, 1:], kv.values[:, :, 1:]), r"layer 3 .*\[2, 2, 69, 8\]"),
    "one row": (lambda kv: LayerKV(kv.keys[:1], kv.values[:1]), r"layer 3 .*\[1, 2, 70, 8\]"),
    "fewer heads": (lambda kv: LayerKV(kv.keys[:, :1], kv.values[:, :1]), r"layer 3 .*\[2, 1, 70, 8\]"),
    "smaller heads": (lambda kv: LayerKV(kv.keys[..., :4], kv.values[..., :4]), r"layer 3 .*\[2, 2, 70, 4\]"),
    "another dtype": (lambda kv: LayerKV(kv.keys.half(), kv.values.half()), r"layer 3 .*torch.float16.*torch.float32"),
    "values of another length": (lambda kv: LayerKV(kv.keys, kv.values[:, :, 1:]), r"layer 3 .*\[2, 2, 69, 8\]"),
}


@pytest.mark.parametrize("odd", ODD)
def test_kv_of_another_shape_or_dtype_is_refused(receiver, sent, odd):
    spoil, message = ODD[odd]
    bad = replace(sent, kv=(*sent.kv[:3], spoil(sent.kv[3])))
    with pytest.raises(CacheError, match=message + ".*it belongs to another model or prefix") as caught:
        partial_prefill(receiver, PREFIX, bad, Group(0, 2))
    assert "\n" not in str(caught.value)
    cache = partial_prefill(receiver, PREFIX, bad, Group(2, 4))  # where the layer is recomputed nobody minds
    assert same(cache, partial_prefill(receiver, PREFIX, sent, Group(2, 4)))


@pytest.mark.parametrize("spoil", [lambda e: e[:, 1:], lambda e: e[:1], lambda e: e[..., :16], lambda e: e.double()])
def test_an_edge_of_another_shape_or_dtype_is_refused(receiver, sent, spoil):
    bad = replace(sent, e_cache={2: spoil(sent.e_cache[2])})
    with pytest.raises(CacheError, match=r"the E-cache at layer 2 of the cache is .*another model or prefix"):
        partial_prefill(receiver, PREFIX, bad, Group(2, 3))


def test_another_depth_is_refused(receiver, tiny):
    other = full_prefill(tiny(1, DEPTH + 1), PREFIX)
    with pytest.raises(CacheError, match="the cache has 5 layers, the model 4"):
        partial_prefill(receiver, PREFIX, other, NOTHING)


def test_layers_that_do_not_see_the_whole_prefix_are_refused(tiny):
    config = MistralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    with pytest.raises(ModelError, match=r"MistralForCausalLM has .*full attention only"):
        full_prefill(MistralForCausalLM(config), PREFIX)
    config.sliding_window = None
    check_supported(MistralForCausalLM(config))
    mixed_kinds = copy.deepcopy(tiny(1, DEPTH, "qwen2"))
    mixed_kinds.config.layer_types = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(ModelError, match="Qwen2ForCausalLM has sliding_attention layers; full attention only"):
        Forward(mixed_kinds, PREFIX)


def test_rope_that_follows_the_length_is_refused(tiny):
    with pytest.raises(ModelError, match=r"rope type 'dynamic' turns keys by the length.*set a fixed scaling"):
        full_prefill(tiny(1, DEPTH, "llama", "dynamic"), PREFIX)


def test_no_token_is_refused():
    for wrong in ([], [[]], [[1], []]):
        with pytest.raises(RequestError, match="at least one token in every row"):
            Prefix.of(wrong)


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ([], []),
        ([3], [Group(3, 4)]),
        ([5, 1, 2, 2, 4], [Group(1, 3), Group(4, 6)]),
        (range(4), [Group(0, 4)]),
    ],
)
def test_spans(layers, groups):
    assert spans(layers) == groups


def test_a_group_reads_as_it_is_written():
    assert (str(Group(2, 5)), str(NOTHING), str(Group(3, 4))) == ("2-4", "none", "3-3")
    assert [len(Group(2, 5)), 2 in Group(2, 5), 5 in Group(2, 5), 1 in Group(2, 5)] == [3, True, False, False]
    assert [Group(0, 2).needs_e_cache, Group(1, 2).needs_e_cache, Group(2, 2).needs_e_cache] == [False, True, False]
