"""What the probes measure: nothing where the cache is the receiver's own, more where it is further from it."""

from __future__ import annotations

import math

import pytest
import torch
from heavy_models import heavy_model

from firsttoken.droidspeak.forward import cache_of, layer_kv
from firsttoken.droidspeak.layer_group import NOTHING
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.study.errors import RequestError
from firsttoken_studies.nb35_bandwidth_and_gate.probes import (
    answer_doubt,
    answer_entropy,
    head_deviation,
    tail_divergence,
)

ROWS = [list(range(10, 40)), list(range(50, 62))]
SUFFIX = torch.tensor([[3, 4, 5], [6, 0, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
LAST = torch.tensor([2, 0])


RECEIVER, SENDER = heavy_model(1), heavy_model(2)
PREFIX = Prefix.of(ROWS)


def mixed(group=NOTHING, sender=SENDER):
    return partial_prefill(
        RECEIVER, PREFIX, full_prefill(sender, PREFIX, [group.lo] if group.needs_e_cache else ()), group
    )


def first_token(cache):
    """Logits [batch, vocabulary] of the first answer token."""
    logits = suffix_logits(RECEIVER, PREFIX, SUFFIX, cache, MASK)
    return logits[torch.arange(2), LAST]


def copied(cache):
    return cache_of(layer_kv(cache, layer) for layer in range(4))


def diverging(cache, tokens):
    return tail_divergence(RECEIVER, PREFIX, cache, SUFFIX, first_token(copied(cache)), tokens, MASK)


class TestAnswer:
    def test_a_uniform_answer(self):
        logits = torch.zeros(2, 1, 8)
        torch.testing.assert_close(answer_entropy(logits), torch.full((2,), math.log(8)))
        torch.testing.assert_close(answer_doubt(logits), torch.ones(2))

    def test_a_sure_answer(self):
        logits = torch.tensor([[[100.0, 0.0, 0.0]]])
        assert answer_entropy(logits).item() == pytest.approx(0, abs=1e-6)
        assert answer_doubt(logits).item() == pytest.approx(0, abs=1e-6)

    def test_the_mean_over_tokens(self):
        logits = torch.tensor([[[0.0, 0.0, -200.0], [math.log(0.7), math.log(0.2), math.log(0.1)]]])
        entropies = math.log(2), -(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1))
        assert answer_entropy(logits).item() == pytest.approx(sum(entropies) / 2, rel=1e-5)
        assert answer_doubt(logits).item() == pytest.approx((1 + 0.5) / 2, rel=1e-5)


class TestHead:
    @pytest.mark.parametrize("tokens", [1, 5, 12])
    def test_equals_full_prefill_of_each_row(self, tokens):
        cache = mixed()
        expected = []
        for row, ids in enumerate(ROWS):
            own, start = full_prefill(RECEIVER, Prefix.of([ids])).kv, PREFIX.tokens - len(ids)
            parts = []
            for layer, kv in enumerate(own):
                for exact, held in zip(kv, layer_kv(cache, layer), strict=True):
                    exact, held = exact[0, :, :tokens], held[row, :, start : start + tokens]
                    parts.append(((held - exact).norm() / exact.norm()).item())
            expected.append(sum(parts) / len(parts))
        torch.testing.assert_close(head_deviation(RECEIVER, PREFIX, cache, tokens), torch.tensor(expected))

    def test_a_suffix_in_the_cache_does_no_harm(self):
        cache = mixed()
        before = head_deviation(RECEIVER, PREFIX, cache, 8)
        first_token(cache)
        assert torch.equal(head_deviation(RECEIVER, PREFIX, cache, 8), before)


class TestTail:
    @pytest.mark.parametrize("tokens", [1, 7, 12])
    def test_the_receivers_own_cache_does_not_diverge(self, tokens):
        assert diverging(mixed(sender=RECEIVER), tokens).abs().max() < 1e-5

    def test_with_all_tokens_it_measures_against_full_prefill(self):
        cache, prefix = mixed(), Prefix.of(ROWS[:1])
        own = suffix_logits(RECEIVER, prefix, SUFFIX[:1], cache_of(full_prefill(RECEIVER, prefix).kv), keep=1)[0, 0]
        sent = partial_prefill(RECEIVER, prefix, full_prefill(SENDER, prefix), NOTHING)
        logits = suffix_logits(RECEIVER, prefix, SUFFIX[:1], copied(sent), keep=1)[:, 0]
        measured = tail_divergence(RECEIVER, prefix, sent, SUFFIX[:1], logits, 30)
        p, q = own.softmax(-1), logits[0].softmax(-1)
        expected = (p * (p / q).log()).sum() + (q * (q / p).log()).sum()
        assert measured.item() == pytest.approx(expected.item(), rel=1e-3)
        assert measured.item() > 1e-2
        # the batch with padding on both sides gives the same for this row
        assert tail_divergence(RECEIVER, PREFIX, cache, SUFFIX, first_token(copied(cache)), 12, MASK)[0].item() == (
            pytest.approx(tail_divergence(RECEIVER, prefix, sent, SUFFIX[:1], logits, 12).item(), rel=1e-3)
        )

    def test_each_row_as_if_alone(self):
        together = diverging(mixed(), 5)
        for row, ids in enumerate(ROWS):
            prefix, suffix = Prefix.of([ids]), SUFFIX[row : row + 1, : LAST[row] + 1]
            sent = partial_prefill(RECEIVER, prefix, full_prefill(SENDER, prefix), NOTHING)
            logits = suffix_logits(RECEIVER, prefix, suffix, copied(sent), keep=1)[:, 0]
            alone = tail_divergence(RECEIVER, prefix, sent, suffix, logits, 5)
            assert alone.item() == pytest.approx(together[row].item(), rel=1e-3)

    def test_leaves_the_cache_alone_and_does_not_mind_a_suffix_in_it(self):
        cache = mixed()
        logits = first_token(cache)
        assert cache.get_seq_length() == PREFIX.tokens + 3
        held = layer_kv(cache, 3).keys.clone()
        after = tail_divergence(RECEIVER, PREFIX, cache, SUFFIX, logits, 6, MASK)
        assert torch.equal(layer_kv(cache, 3).keys, held)
        torch.testing.assert_close(after, diverging(mixed(), 6))


@pytest.mark.parametrize("tokens", [0, -1, 13])
def test_a_probe_out_of_range_is_refused(tokens):
    cache = mixed()
    with pytest.raises(RequestError, match="give 1 to 12"):
        head_deviation(RECEIVER, PREFIX, cache, tokens)
    with pytest.raises(RequestError, match="give 1 to 12"):
        tail_divergence(RECEIVER, PREFIX, cache, SUFFIX, torch.zeros(2, 256), tokens, MASK)
