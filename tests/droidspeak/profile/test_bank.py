"""Every number of a bank is what one finds item by item, unpadded, with a prefill for each mixture."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_tokens import TOLERANCE, Plain
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from firsttoken.droidspeak.forward import cache_of, layer_kv
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, spans
from firsttoken.droidspeak.prefix import LayerKV, Prefix, PrefixCache
from firsttoken.droidspeak.profile.layer_profiler import LayerProfiler, Questions, Score
from firsttoken.study.errors import RequestError
from firsttoken_studies.droidspeak.reuse_items import Encoded, TaskItem

DEPTH = 5
LENGTHS = [(40, 3, 4), (23, 5, 1), (31, 1, 6)]  # prefix, suffix, target
REUSED = 2  # the item whose target is what is said over the sender's cache; the first one's is over the receiver's own


def model_pair(tiny) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Receiver and sender."""
    return tiny(1, DEPTH), tiny(2, DEPTH)


@torch.inference_mode()
def said(model: PreTrainedModel, cache: DynamicCache, suffix: list[int], tokens: int) -> list[int]:
    """Greedy tokens, one by one, through the model's own forward."""
    new, answer = suffix, []
    for _ in range(tokens):
        answer.append(int(model(torch.tensor([new]), past_key_values=cache).logits[0, -1].argmax()))
        new = answer[-1:]
    return answer


@pytest.fixture(scope="module")
def items(tiny) -> list[Encoded]:
    (receiver, sender), draw = model_pair(tiny), torch.Generator().manual_seed(4)
    made = []
    for number, lengths in enumerate(LENGTHS):
        prefix, suffix, target = (torch.randint(1, 256, (n,), generator=draw).tolist() for n in lengths)
        if number != 1:
            cache = full_prefill(sender if number == REUSED else receiver, Prefix.of([prefix])).kv
            target = said(receiver, cache_of(cache), suffix, len(target))
        made.append(Encoded(TaskItem(str(number), "qa", "", "", ("",)), prefix, suffix, target))
    return made


@pytest.fixture(scope="module")
def profiler(tiny, items) -> LayerProfiler:
    """With every edge, so that all sets of layers can be asked for."""
    receiver, sender = model_pair(tiny)
    return LayerProfiler(sender, receiver, Questions.of([item.tokens for item in items]), range(DEPTH))


@torch.inference_mode()
def naive(model: PreTrainedModel, cache: DynamicCache, item: Encoded) -> tuple[float, Plain, Tensor]:
    """Likelihood over ``cache``, its logits beside the asked tokens, and the output of the last layer at these."""
    seen: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    logits = model(torch.tensor([item.suffix + item.target]), past_key_values=cache).logits[0]
    hook.remove()
    asked = slice(len(item.suffix) - 1, -1)
    nll = F.cross_entropy(logits[asked], torch.tensor(item.target)).item()
    return nll, Plain(item.target, logits[asked]), seen[0][0, asked]


def check(score: Score, model: PreTrainedModel, caches: Sequence[DynamicCache], own, items, away: bool = True) -> None:
    for i, (item, cache, reference) in enumerate(zip(items, caches, own, strict=True)):
        nll, plain, hidden = naive(model, cache, item)
        assert score.nll[i].item() == pytest.approx(nll, rel=1e-3, abs=1e-3)
        if plain.margin > TOLERANCE:
            right = (plain.logits.argmax(-1) == torch.tensor(item.target)).float()
            assert score.accuracy[i].item() == pytest.approx(right.mean().item())
        if away:
            distance = ((hidden - reference).norm(dim=-1) / reference.norm(dim=-1)).mean().item()
            assert score.deviation[i].item() == pytest.approx(distance, rel=1e-3, abs=1e-4)


@pytest.fixture(scope="module")
def truth(tiny, items):
    """``truth.cache(item, layers)``: the naive mixture; ``truth.own``: the outputs over the receiver's own cache."""
    receiver, sender = model_pair(tiny)

    class Truth:
        def __init__(self) -> None:
            self.prefixes = [Prefix.of([item.prefix]) for item in items]
            self.sent = [full_prefill(sender, prefix, range(DEPTH)) for prefix in self.prefixes]
            self.kv = [full_prefill(receiver, prefix).kv for prefix in self.prefixes]
            self.own = [naive(receiver, cache_of(kv), item)[2] for kv, item in zip(self.kv, items, strict=True)]

        def recomputing(self, layers) -> list[DynamicCache]:
            return [self._one(prefix, sent, layers) for prefix, sent in zip(self.prefixes, self.sent, strict=True)]

        def _one(self, prefix: Prefix, sent: PrefixCache, layers) -> DynamicCache:
            kv: list[LayerKV] = list(sent.kv)
            for group in spans(layers):
                cache = partial_prefill(receiver, prefix, sent, group)
                kv[group.lo : group.hi] = [layer_kv(cache, layer) for layer in group.layers]
            return cache_of(kv)

    return Truth()


def test_the_receiver_s_own_the_sender_s_and_the_sender_itself(tiny, profiler, items, truth):
    receiver, sender = model_pair(tiny)
    check(profiler.prefill(), receiver, [cache_of(kv) for kv in truth.kv], truth.own, items)
    assert torch.equal(profiler.prefill().deviation, torch.zeros(len(items)))
    check(profiler.reuse(), receiver, truth.recomputing([]), truth.own, items)
    check(profiler.sender_itself(), sender, [cache_of(sent.kv) for sent in truth.sent], truth.own, items, away=False)
    assert [(score().accuracy == 1).tolist() for score in (profiler.prefill, profiler.reuse)] == [
        [True, False, False],
        [False, False, True],
    ]
    assert profiler.reuse().deviation.min() > 0.05, "another model's cache must show"


@pytest.mark.parametrize("edges", [[0, 1, 2, 3, 4, 5], [0, 2, 4, 5], [0, 3, 5], [0, 5], [1, 3, 4]], ids=str)
def test_every_group_of_every_choice_of_edges(tiny, items, truth, edges):
    receiver, sender = model_pair(tiny)
    profiler = LayerProfiler(sender, receiver, Questions.of([item.tokens for item in items]), edges[:-1])
    found = dict(profiler.groups(edges))
    pairs = [(lo, hi) for i, lo in enumerate(edges) for hi in edges[i + 1 :]]
    assert list(found) == [NOTHING, *(Group(lo, hi) for lo, hi in pairs)]
    for group, score in found.items():
        check(score, receiver, truth.recomputing(group.layers), truth.own, items)
    assert sum(len(group) for group in found) >= profiler.prefix_layers - 2 * DEPTH


def test_single_layers(tiny, profiler, items, truth):
    receiver, _ = model_pair(tiny)
    found = dict(profiler.single_layers())
    assert list(found) == list(range(DEPTH))
    for layer, score in found.items():
        caches = []
        for sent, kv in zip(truth.sent, truth.kv, strict=True):
            caches.append(cache_of([*kv[:layer], sent.kv[layer], *kv[layer + 1 :]]))
        check(score, receiver, caches, truth.own, items)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.sets(st.integers(0, DEPTH - 1)))
def test_scattered_layers(tiny, profiler, items, truth, layers):
    check(profiler.scattered(layers), model_pair(tiny)[0], truth.recomputing(layers), truth.own, items)


def test_asking_in_another_order_changes_nothing(tiny, profiler, items):
    receiver, sender = model_pair(tiny)
    fresh = LayerProfiler(sender, receiver, Questions.of([item.tokens for item in items]), range(DEPTH))
    for layers in ([1], [1, 2, 3], [1, 2], [0], [0, 1, 2, 4]):  # longer and shorter runs from one edge
        assert torch.equal(fresh.scattered(layers).nll, profiler.scattered(layers).nll)
    groups = dict(fresh.groups([0, 2, 5]))
    assert torch.equal(groups[Group(2, 5)].nll, fresh.scattered([2, 3, 4]).nll)
    assert torch.equal(groups[Group(0, 5)].nll, profiler.prefill().nll)


def test_what_was_sent_stays_as_it_is(tiny, items):
    receiver, sender = model_pair(tiny)
    profiler = LayerProfiler(sender, receiver, Questions.of([item.tokens for item in items]), [0, 2])
    before = [[part.clone() for part in kv] for kv in profiler.sent.kv]
    list(profiler.single_layers())
    list(profiler.groups([0, 2, 5]))
    for kv, old in zip(profiler.sent.kv, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kv, old, strict=True))


def test_prefix_layers_counts_each_layer_once(tiny, items):
    receiver, sender = model_pair(tiny)
    profiler = LayerProfiler(sender, receiver, Questions.of([item.tokens for item in items]), range(DEPTH))
    run: list[PreTrainedModel] = []
    width = profiler.questions.prefix.tokens
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: run.append(1) if args[0].shape[1] == width else None)
        for layer in receiver.model.layers
    ]
    assert width != profiler.questions.ids.shape[1]
    try:
        for ask, more in (
            (profiler.reuse, 5),  # its deviation is from the receiver's own
            (profiler.prefill, 0),
            (lambda: list(profiler.single_layers()), 0),
            (lambda: list(profiler.groups([0, 2, 4, 5])), 3 + 1),
            (lambda: profiler.scattered([0, 1]), 0),
            (lambda: profiler.scattered([3]), 1),
            (lambda: profiler.scattered([3, 4]), 2),
        ):
            before = profiler.prefix_layers
            ask()
            assert profiler.prefix_layers - before == more
        assert profiler.prefix_layers == DEPTH + len(run)  # the sender's own prefill came before the hooks
    finally:
        for hook in hooks:
            hook.remove()


def test_layers_and_edges_that_are_not_there_are_refused(tiny, items):
    receiver, sender = model_pair(tiny)
    profiler = LayerProfiler(sender, receiver, Questions.of([item.tokens for item in items]), [0, 2])
    with pytest.raises(RequestError, match=r"no E-cache at layer 3 was stored \(there: 2\)"):
        profiler.scattered([3])
    with pytest.raises(RequestError, match="does not fit 5 layers"):
        profiler.scattered([2, 3, 4, 5])


def test_questions_are_padded_where_they_should_be(items):
    questions = Questions.of([item.tokens for item in items])
    assert questions.prefix.mask.sum(1).tolist() == [40, 23, 31]
    assert questions.mask.sum(1).tolist() == [7, 6, 7] and questions.mask[1].tolist() == [1] * 6 + [0]
    wanted = questions.ids.roll(-1, 1)
    assert [wanted[i][questions.predicts[i]].tolist() for i in range(3)] == [item.target for item in items]
