"""A model in segments: the same logits however it is cut, and any span of layers over any tokens from their edge.

Tiny random models in fp32. However it is cut, the same modules run in the same order: the logits are equal to the bit.
Beside the plain model, and beside partial prefill, they are held to 1e-4 (1e-5 was seen).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from typing import Any

import peft
import pytest
import torch
from chunked import Chunked
from listening import Listening
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from firsttoken.droidspeak.forward import layer_kv
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import LayerKV, Prefix
from firsttoken.engine.decoder import LocalSegment
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.request import GREEDY, LayerRecompute, Request, Sampling, ScheduledChunk
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.sdpa_attention import PaddedAttend
from firsttoken.study.errors import ModelError, RequestError
from firsttoken_cpu.fused import fuse_layer
from firsttoken_cpu.native.library import kernels

TOLERANCE = 1e-4
DEPTH = 6
SHAPE = LlamaConfig(
    num_hidden_layers=DEPTH,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    max_position_embeddings=512,
    pad_token_id=0,
)
CUTS = ((), (3,), (1, 4))
FUSES = pytest.param("fused", marks=pytest.mark.skipif(kernels() is None, reason="no compiler builds the kernels here"))


@pytest.fixture(scope="module")
def deep(make_subject) -> Any:
    """Six layers, with some known answers."""
    return make_subject(copy.deepcopy(SHAPE))


def cut(model: nn.Module, cuts: Sequence[int], kind: str = "stock") -> list[LocalSegment]:
    """The layers of ``model`` in segments; fused, or every other one of them."""
    layers = list(model.model.layers)
    if kind != "stock":
        layers = [fuse_layer(layer) if kind == "fused" or i % 2 else layer for i, layer in enumerate(layers)]
    ends = [0, *cuts, DEPTH]
    return [LocalSegment(layers[lo:hi], lo) for lo, hi in pairwise(ends)]


def crowd(lab, subject, scheduler: str, blocks: int = 18, **options: Any):
    """All known prompts in a pool for little more than one, its executor made with ``options``."""

    def executor(model: nn.Module, count: int, **own: Any) -> LiveExecutor:
        return LiveExecutor(model, count, **own, **options)

    turns = cycle((Action.RECOMPUTE, Action.SWAP, Action.BOTH_ENDS))
    policy = Listening(lambda tokens: next(turns))
    run = lab.live(subject.model, blocks, kind=executor, host_blocks=100, policy=policy, scheduler=scheduler)
    for one in subject.known:
        run.submit(one.prompt, Sampling(24), 0.0)
    return run


# -- however it is cut


@pytest.mark.parametrize("kind", ["stock", FUSES, pytest.param("mixed", marks=FUSES.marks)])
def test_one_two_and_three_segments_have_equal_logits(bench, deep, kind: str) -> None:
    """Whole prompts, pieces and decodes in one step."""
    said = []
    for cuts in CUTS:
        model = copy.deepcopy(deep.model)
        one = bench(model, segments=cut(model, cuts, kind), seed=5)
        asked = [one.request(length) for length in (1, 7, 16, 33)]
        rows = []
        for step in range(6):
            chunks = [(request, max(1, request.remaining // 2) if step < 2 else request.remaining) for request in asked]
            got, plain = one.execute(chunks)
            torch.testing.assert_close(got, plain, atol=TOLERANCE, rtol=0)
            rows.append(got)
            for request in asked:
                if not request.remaining:
                    one.grow(request)
        said.append(torch.cat(rows))
        one.close()
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])


@pytest.mark.parametrize("scheduler", ["prefill_first", "chunked"])
@pytest.mark.parametrize("kind", ["stock", FUSES])
def test_segments_say_the_plain_tokens(lab, deep, kind: str, scheduler: str, monkeypatch) -> None:
    """With prompts in pieces, swaps and recomputes."""
    monkeypatch.setitem(SCHEDULERS, "chunked", Chunked)
    lab.close()
    for cuts in CUTS:
        run = crowd(lab, deep, scheduler, segments=cut(deep.model, cuts, kind))
        assert run.finish() == [list(one.answer) for one in deep.known]
        assert {recovery.action for recovery in run.trace.recoveries} == set(Action)


def test_the_users_model_keeps_its_layers(lab, deep) -> None:
    layers = list(deep.model.model.layers)
    run = crowd(lab, deep, "prefill_first", segments=cut(deep.model, (3,)))
    assert list(deep.model.model.layers) == layers
    run.finish()
    lab.close()
    assert list(deep.model.model.layers) == layers and deep.model.config._attn_implementation == "sdpa"


# -- layers [lo, hi) over tokens [a, b)


def recompute(executor: LiveExecutor, chunk: ScheduledChunk, layers: range, hidden: torch.Tensor | None = None) -> None:
    """``chunk`` through ``layers`` only, from ``hidden`` [1, tokens, hidden] of its tokens or from its ids."""
    if hidden is not None:
        hidden = torch.cat([hidden.new_zeros(1, chunk.start, hidden.shape[2]), hidden], dim=1)
    executor.execute([chunk._replace(redo=LayerRecompute(layers, chunk.end, hidden))])


class Hand:
    """One request of a receiver, its blocks given by hand."""

    def __init__(self, model: PreTrainedModel, tokens: Sequence[int], **options: Any) -> None:
        self.executor = LiveExecutor(model, 40, block_tokens=5, **options)
        self.request = Request(0, tokens, GREEDY, 0.0)
        self.request.blocks = random.Random(1).sample(range(40), 20)

    def put(self, layer: int, kv: LayerKV) -> None:
        """Somebody's keys and values of all tokens at ``layer``."""
        positions = torch.arange(kv.keys.shape[2])
        blocks, offsets = torch.tensor(self.request.blocks)[positions // 5], positions % 5
        for side, half in enumerate(kv):
            self.executor.pool.rows[blocks, layer, side, offsets] = half[0].transpose(0, 1)

    def held(self, layer: int, tokens: int) -> LayerKV:
        """What the pool holds of ``layer``, as a cache has it."""
        rows = self.executor.pool.rows[self.request.blocks, layer]  # [blocks, 2, size, kv_heads, head_dim]
        return LayerKV(*(rows[:, side].flatten(0, 1)[:tokens].transpose(0, 1)[None] for side in (0, 1)))

    def next_logits(self) -> torch.Tensor:
        """After all of its tokens."""
        seen = []
        logits = self.executor.version.decoder.logits
        self.executor.version.decoder.logits = lambda step: seen.append(logits(step)) or seen[-1]
        self.executor.execute([self.request.chunk()])
        self.request.advance(len(self.request.tokens))
        self.executor.version.decoder.logits = logits
        return seen[0]


@pytest.fixture(scope="module")
def pair(make_model) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A receiver and a sender of one shape."""
    return make_model(copy.deepcopy(SHAPE), seed=1), make_model(copy.deepcopy(SHAPE), seed=2)


@pytest.mark.parametrize("attend", ["padded", "fastest"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "group", [Group(2, 4), Group(0, 3), Group(4, 6), Group(0, 6), Group(1, 2), Group(3, 3)], ids=str
)
def test_a_recomputed_group_is_partial_prefill(pair, group: Group, pieces: int, attend: str) -> None:
    """The sender's keys and values in the other layers; then the suffix, and answers token by token."""
    receiver, sender = pair
    draw = random.Random(3)
    prompt, suffix = ([draw.randrange(256) for _ in range(count)] for count in (33, 4))
    prefix = Prefix.of([prompt])
    sent = full_prefill(sender, prefix, {group.lo} if group.needs_e_cache else ())
    cache = partial_prefill(receiver, prefix, sent, group)
    wanted = suffix_logits(receiver, prefix, torch.tensor([suffix]), copy.deepcopy(cache), keep=1)[0]
    alone = suffix_logits(
        receiver, prefix, torch.tensor([suffix]), partial_prefill(receiver, prefix, sent, Group(0, 0))
    )
    segments = cut(receiver, (1, 3))
    hand = Hand(receiver, prompt + suffix, attend=PaddedAttend if attend == "padded" else None, segments=segments)
    try:
        for layer, kv in enumerate(sent.kv):
            if layer not in group:
                hand.put(layer, kv)
        for piece in range(pieces):
            chunk = hand.request.chunk(len(prompt) // pieces)
            hidden = sent.e_cache[group.lo][:, chunk.start : chunk.end] if group.needs_e_cache else None
            if len(group):
                recompute(hand.executor, chunk, group.layers, hidden)
            hand.request.advance(chunk.end)
            assert piece < pieces - 1 or chunk.end == len(prompt)
        for layer in range(DEPTH):
            torch.testing.assert_close(
                hand.held(layer, len(prompt)),
                layer_kv(cache, layer),
                atol=0 if layer not in group else TOLERANCE,
                rtol=0,
            )
        got = hand.next_logits()
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
        assert not len(group) or not torch.allclose(got, alone[:, -1], atol=0.1), "the group does not matter"
    finally:
        hand.executor.close()


@pytest.mark.parametrize("attend", ["padded", "fastest"])
@pytest.mark.parametrize("group", [Group(2, 4), Group(1, 6), Group(4, 6), Group(1, 2), Group(0, 3)], ids=str)
def test_a_recomputed_group_goes_with_who_runs(pair, group: Group, attend: str) -> None:
    """A decode and a longer prompt beside it: everybody has what they would have alone, and where the group begins with
    hidden states its layers run once for all of them."""
    receiver, sender = pair
    draw = random.Random(7)
    prompt, short, long = ([draw.randrange(256) for _ in range(count)] for count in (33, 9, 40))
    prefix = Prefix.of([prompt])
    sent = full_prefill(sender, prefix, {group.lo} if group.needs_e_cache else ())
    cache = partial_prefill(receiver, prefix, sent, group)
    way = {"attend": PaddedAttend if attend == "padded" else None, "hidden_cache": HiddenStateCache(range(DEPTH))}
    said, kept = [], []
    for redone in (False, True):
        hand = Hand(receiver, prompt, segments=cut(receiver, (1, 3)), **way)
        executor, others = hand.executor, [Request(number, ids, GREEDY, 0.0) for number, ids in ((1, short), (2, long))]
        free = [block for block in range(40) if block not in hand.request.blocks]
        try:
            for request, mine in zip(others, (free[:2], free[2:]), strict=True):
                request.blocks = mine
            executor.execute([others[0].chunk(8)])
            others[0].advance(8)
            chunks = [request.chunk() for request in others]
            if redone:
                hidden = sent.e_cache[group.lo][:, : len(prompt)] if group.needs_e_cache else None
                chunks.insert(1, hand.request.chunk()._replace(redo=LayerRecompute(group.layers, len(prompt), hidden)))
            decoder, runs = executor.version.decoder, []
            logits = decoder.logits
            decoder.logits = lambda step, logits=logits: said.append(logits(step)) or said[-1]
            hook = receiver.model.layers[group.lo].register_forward_hook(lambda *_, runs=runs: runs.append(1))
            executor.execute(chunks)
            hook.remove()
            assert len(runs) == (2 if redone and not group.needs_e_cache else 1)
            kept.append(
                [executor.version.hidden_cache.of(number, layer) for number in (1, 2) for layer in range(DEPTH)]
            )
            if redone:
                for layer in group.layers:
                    torch.testing.assert_close(
                        hand.held(layer, len(prompt)), layer_kv(cache, layer), atol=TOLERANCE, rtol=0
                    )
        finally:
            executor.close()
    torch.testing.assert_close(said[1], said[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(kept[1], kept[0], atol=TOLERANCE, rtol=0)


def test_what_does_not_fit_joins_nobody(pair) -> None:
    """As alone: one clear error."""
    hand = Hand(pair[0], list(range(8)))
    other = Request(1, [5, 6, 7], GREEDY, 0.0)
    other.blocks = [next(block for block in range(40) if block not in hand.request.blocks)]
    try:
        for layers, wide, message in ((range(2, 9), 32, "not among"), (range(2, 4), 31, "do not fit")):
            redo = LayerRecompute(layers, 8, torch.zeros(1, 8, wide))
            with pytest.raises(RequestError, match=message):
                hand.executor.execute([other.chunk(), hand.request.chunk()._replace(redo=redo)])
    finally:
        hand.executor.close()


def test_a_kept_edge_is_the_e_cache(pair) -> None:
    model, _ = pair
    prompt = [random.Random(4).randrange(256) for _ in range(29)]
    sent = full_prefill(model, Prefix.of([prompt]), range(DEPTH))
    hand = Hand(model, prompt, hidden_cache=HiddenStateCache(range(DEPTH)), segments=cut(model, (2,)))
    try:
        for end in (7, 8, 29):
            hand.executor.execute([hand.request.chunk(end - hand.request.cached)])
            hand.request.advance(end)
        for layer in range(DEPTH):
            kept = hand.executor.version.hidden_cache.of(0, layer)
            torch.testing.assert_close(kept, sent.e_cache[layer], atol=TOLERANCE, rtol=0)
        hand.executor.forget(hand.request)
        assert hand.executor.version.hidden_cache.nbytes == 0
    finally:
        hand.executor.close()


@pytest.mark.parametrize("scheduler", ["prefill_first", "chunked"])
def test_upper_layers_come_back_from_their_edge(lab, deep, scheduler: str, monkeypatch) -> None:
    """What a stage change does: in the middle of their answers, after swaps and recomputes, all open requests lose the
    upper layers' keys and values, and have them again from the boundary."""
    monkeypatch.setitem(SCHEDULERS, "chunked", Chunked)
    lab.close()
    right = []
    for again in (True, False):
        run = crowd(lab, deep, scheduler, hidden_cache=HiddenStateCache([2]), segments=cut(deep.model, (2,)))
        executor, done = run.engine.executor, 0
        run.until(lambda run=run: len(run.trace.recoveries) > 3)
        while run.engine.busy:
            run.step()
            for request in run.engine.scheduler.running:
                if done < 6 and request.decoding:
                    done += 1
                    executor.pool.rows[request.blocks, 2:] = 0
                    if again:
                        chunk = ScheduledChunk(request, 0, request.cached, request.computed)
                        recompute(executor, chunk, range(2, DEPTH), executor.version.hidden_cache.of(request.number, 2))
        assert done == 6 and executor.version.hidden_cache.nbytes == 0
        right.append([request.output for request in run.requests] == [list(one.answer) for one in deep.known])
    assert right == [True, False]


# -- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda layers: [LocalSegment(layers[:3]), LocalSegment(layers[4:], 4)],
            r"segments \[0, 3\), \[4, 6\) are not",
        ),
        (lambda layers: [LocalSegment(layers[:3]), LocalSegment(layers[3:])], r"segments \[0, 3\), \[0, 3\) are not"),
        (lambda layers: [LocalSegment(layers[:5])], r"segments \[0, 5\) are not the model's layers \[0, 6\) in order"),
        (lambda layers: [LocalSegment(layers, 1)], r"segments \[1, 7\) are not"),
    ],
)
def test_segments_that_are_not_the_model_are_refused(lab, deep, make: Callable, message: str) -> None:
    lab.close()
    with pytest.raises(ModelError, match=message):
        LiveExecutor(deep.model, 10, segments=make(deep.model.model.layers))
    assert deep.model.config._attn_implementation == "sdpa"


def test_work_that_does_not_fit_is_refused_and_changes_nothing(pair) -> None:
    model, _ = pair
    hand = Hand(model, range(8), hidden_cache=HiddenStateCache([2]))
    before = hand.executor.pool.rows.clone()
    right = torch.zeros(1, 8, 32)
    for layers, hidden, message in (
        (range(2, 7), right, r"layers \[2, 7\) are not among the model's \[0, 6\)"),
        (range(2, 4), None, "a step from layer 2 needs the hidden states"),
        (range(2, 4), right[:, :7], r"hidden states of \[1, 7, 32\] do not fit: the step has \[1, 8, 32\]"),
        (range(2, 4), right[..., :16], r"hidden states of \[1, 8, 16\] do not fit"),
    ):
        with pytest.raises(RequestError, match=message):
            recompute(hand.executor, hand.request.chunk(), layers, hidden)
    with pytest.raises(RequestError, match=r"no hidden states of request 0 are kept at layer 2 \(layers: 2\)"):
        hand.executor.version.hidden_cache.of(0, 2)
    assert torch.equal(hand.executor.pool.rows, before)
    hand.executor.close()
    with pytest.raises(ModelError, match="the engine was closed"):
        recompute(hand.executor, hand.request.chunk(), range(2))


def test_an_edge_of_shared_blocks_is_refused(pair) -> None:
    hand = Hand(pair[0], range(9), hidden_cache=HiddenStateCache([1]))
    hand.request.advance(5)
    hand.executor.execute([hand.request.chunk()])
    with pytest.raises(RequestError, match="no hidden states of its first 5 tokens at layer 1: they came with shared"):
        hand.executor.version.hidden_cache.of(0, 1)
    hand.executor.close()


def test_a_learned_prompt_is_refused(deep) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ModelError, match="this model has a prompt that PEFT learned; take it off"):
        LiveExecutor(peft.get_peft_model(copy.deepcopy(deep.model), config), 10)
