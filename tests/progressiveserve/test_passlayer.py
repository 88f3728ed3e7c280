"""Layers that pass, held against the model without them, and the KV cache that has gaps."""

from __future__ import annotations

import copy
from itertools import combinations

import pytest
import torch
from plain_tokens import Plain, check_greedy, generated
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.progressiveserve.passlayer import PassLayer, pass_layers, restore_layers
from firsttoken.progressiveserve.quality import PrunedCache
from firsttoken.study.errors import StageError

DEPTH = 4
TOLERANCE = {"rtol": 0, "atol": 2e-5}  # fp32 logits of magnitude 10; sums may be taken in another order
SUBSETS = [subset for size in range(1, DEPTH + 1) for subset in combinations(range(DEPTH), size)]

pytestmark = pytest.mark.parametrize("kind", ["llama", "qwen2"])


def shortened(model: PreTrainedModel, removed: tuple[int, ...]) -> PreTrainedModel:
    """A copy without the layers ``removed``, the others numbered anew."""
    short = copy.deepcopy(model)
    kept = [layer for i, layer in enumerate(short.model.layers) if i not in removed]
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    short.model.layers = torch.nn.ModuleList(kept)
    short.config.num_hidden_layers = len(kept)
    short.config.layer_types = ["full_attention"] * len(kept)
    return short


@torch.inference_mode()
def stepwise(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, given: int) -> Tensor:
    """Logits [batch, tokens, vocabulary] of a prefill of ``given`` tokens and of single steps over the others."""
    parts = [ids[:, :given], *ids[:, given:].split(1, dim=1)]
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1)


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, steps: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens [batch, steps] chosen greedily, and the logits that chose them."""
    logits = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1]]
    for _ in range(steps - 1):
        token = logits[-1].argmax(-1, keepdim=True)
        logits.append(model(token, past_key_values=cache, use_cache=True).logits[:, -1])
    scores = torch.stack(logits, 1)
    return scores.argmax(-1), scores


@pytest.mark.parametrize("missing", [(0,), (1, 2), (0, 1), (2, 3), (0, 1, 2)])
def test_a_passed_block_is_the_shortened_model(make_model, ids, kind, missing):
    model = make_model(kind)
    short = shortened(model, missing)
    full = model(ids, use_cache=False).logits
    pass_layers(model, missing)
    passed = model(ids, use_cache=False).logits
    torch.testing.assert_close(passed, short(ids, use_cache=False).logits, **TOLERANCE)
    assert (passed - full).abs().max() > 1000 * TOLERANCE["atol"], "the block matters"
    tokens, scores = greedy(model, ids, PrunedCache())
    short_tokens, short_scores = greedy(short, ids, DynamicCache())
    for said, plain in zip(tokens.tolist(), map(Plain, short_tokens.tolist(), short_scores), strict=True):
        assert check_greedy(said, plain) == 8
    torch.testing.assert_close(scores, short_scores, **TOLERANCE)


@pytest.mark.parametrize("missing", SUBSETS, ids=str)
def test_decoding_with_any_gaps_equals_the_forward_without_a_cache(make_model, ids, kind, missing):
    model = make_model(kind, DEPTH)
    pass_layers(model, missing)
    expected = model(ids, use_cache=False).logits
    cache = PrunedCache()
    torch.testing.assert_close(stepwise(model, ids, cache, given=7), expected, **TOLERANCE)
    assert cache.get_seq_length() == (0 if len(missing) == DEPTH else ids.shape[1])
    assert all(cache.get_seq_length(i) == cache.get_seq_length() for i in range(DEPTH))


def test_a_gap_at_layer_0_is_what_the_cache_guards_against(make_model, ids, kind):
    model = make_model(kind)
    pass_layers(model, [0])
    expected = model(ids, use_cache=False).logits
    plain = stepwise(model, ids, DynamicCache(), given=7)
    torch.testing.assert_close(plain[:, :7], expected[:, :7], **TOLERANCE)
    assert (plain[:, 7:] - expected[:, 7:]).abs().max() > 0.1, "positions restart at 0, without an error"


def test_generate_takes_the_cache(make_model, ids, kind):
    model = make_model(kind)
    pass_layers(model, [0])
    for prompt in ids.tolist():
        cached = generated(model, prompt, 6, past_key_values=PrunedCache(), eos_token_id=None)
        assert check_greedy(cached.tokens, generated(model, prompt, 6, use_cache=False, eos_token_id=None)) == 6


@pytest.mark.parametrize("missing", [(0,), (1, 2), (0, 1, 2, 3)])
def test_all_real_after_a_restore_is_the_original_to_the_bit(make_model, ids, kind, missing):
    model = make_model(kind)
    stood = list(layers_of(model))
    before, decoded = model(ids, use_cache=False).logits, stepwise(model, ids, DynamicCache(), 7)
    removed = pass_layers(model, missing)
    assert removed == {i: stood[i] for i in missing}
    assert [isinstance(layer, PassLayer) for layer in layers_of(model)] == [i in missing for i in range(DEPTH)]
    restore_layers(model, removed)
    assert list(layers_of(model)) == stood
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert torch.equal(stepwise(model, ids, PrunedCache(), 7), decoded)


@pytest.mark.parametrize("indices", [[1, DEPTH], [-1], [-1, 2], [0, 99]])
def test_a_bad_index_changes_nothing(make_model, kind, indices):
    model = make_model(kind)
    stood = list(layers_of(model))
    with pytest.raises(StageError, match=r"do not fit a model of 4 layers \(0-based 0-3\)") as caught:
        pass_layers(model, indices)
    assert "\n" not in str(caught.value)
    assert list(layers_of(model)) == stood


def test_no_layers_and_repeated_ones(make_model, kind):
    model = make_model(kind)
    assert pass_layers(model, []) == {}
    assert list(pass_layers(model, iter([2, 2]))) == [2]
