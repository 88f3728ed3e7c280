"""A generation whose model changes under it: every policy against a fresh prefill by the better stage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.link import Link
from firsttoken.progressive.checkpoint.plan import coarse_first
from firsttoken.progressive.loading.loader import Skeleton, StageLoad
from firsttoken.progressive.loading.views import lowest_changed
from firsttoken.progressive.recovery.contexts import Context
from firsttoken.progressive.recovery.transitions import (
    TRANSITIONS,
    FromBoundary,
    Naive,
    PrefillAgain,
    RequestBoundary,
    find_transition,
)
from firsttoken.study.errors import StageError

DEPTH, VOCABULARY = 6, 260
EXACT = {"rtol": 0, "atol": 4e-5}  # fp32 logits of magnitude 10; a decode step adds up in another order than a prefill
CORRECT = [PrefillAgain(), FromBoundary()]

fast = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
tokens = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12)


@st.composite
def removed(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is missing in stages 1 and 2: a block anywhere, layer 0 and the top included, cut in two."""
    size = draw(st.integers(1, DEPTH - 1))
    first = draw(st.integers(0, DEPTH - size))
    block = tuple(range(first, first + size))
    return block, block[draw(st.integers(0, size)) :]


@pytest.fixture
def model(make_model):
    """Six layers; which of them compute changes, and no weight does."""
    return make_model(layers=DEPTH)


def begun(model, view, policy, prompt, more):
    """A context of ``prompt`` and then single ``more`` tokens."""
    context = Context(model, view, policy.keep(view))
    context.feed(prompt)
    for token in more:
        context.feed([token])
    return context


def decoded(context, steps):
    return torch.stack([context.feed([token]) for token in steps])


def fresh(model, view, prompt, steps):
    """Logits of ``steps`` after a prefill of ``prompt`` by ``view`` alone."""
    return decoded(begun(model, view, Naive(), prompt, []), steps)


@pytest.mark.parametrize("policy", CORRECT, ids=lambda policy: policy.name)
@fast
@given(missing=removed(), prompt=tokens, more=tokens, steps=tokens)
def test_the_next_tokens_are_those_of_a_fresh_prefill(model, views, policy, missing, prompt, more, steps):
    old, new, last = views(model, [*missing, ()])
    context = begun(model, old, policy, prompt, more)
    policy.carry(context, new)
    assert context.view is new
    assert context.ids == prompt + more
    torch.testing.assert_close(decoded(context, steps), fresh(model, new, prompt + more, steps), **EXACT)
    policy.carry(context, last)  # two in a row, with tokens of both stages in it
    torch.testing.assert_close(decoded(context, steps), fresh(model, last, prompt + more + steps, steps), **EXACT)
    assert context.cache.get_seq_length() == len(context.ids)
    assert [layer.get_seq_length() for layer in context.cache.layers] == [len(context.ids)] * DEPTH


@pytest.mark.parametrize("policy", CORRECT, ids=lambda policy: policy.name)
def test_two_in_a_row_without_a_token_between(model, views, policy):
    first, second, last = views(model, [(2, 3, 4), (3, 4), ()])
    context = begun(model, first, policy, [5, 6, 7], [8])
    policy.carry(context, second)
    policy.carry(context, last)
    torch.testing.assert_close(decoded(context, [9, 10]), fresh(model, last, [5, 6, 7, 8], [9, 10]), **EXACT)


@pytest.mark.parametrize("policy", CORRECT, ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_layers_that_come_in_any_order(make_model, views, policy, kind):
    """The upper layer first: the lowest missing one is kept, and what lies above is computed twice."""
    model = make_model(kind, layers=DEPTH)
    old, middle, last = views(model, [(1, 2, 4), (1, 2), ()])
    context = begun(model, old, policy, [5, 6, 7], [8])
    for view in (middle, last):
        policy.carry(context, view)
        ids = list(context.ids)
        torch.testing.assert_close(decoded(context, [9, 10]), fresh(model, view, ids, [9, 10]), **EXACT)


@fast
@given(missing=removed(), prompt=tokens, more=tokens, steps=tokens)
def test_a_request_boundary_changes_nothing_at_all(model, views, missing, prompt, more, steps):
    old, new, _ = views(model, [*missing, ()])
    plain, carried = (begun(model, old, RequestBoundary(), prompt, more) for _ in range(2))
    RequestBoundary().carry(carried, new)
    new.activate(model)  # as the other requests of the same engine do between any two tokens
    for token in steps:
        expected, found = plain.feed([token]), carried.feed([token])
        new.activate(model)
        assert torch.equal(found, expected)


def test_naive_is_wrong(model, views):
    """Also where the token happens to be the same: the logits are those of neither stage."""
    worst = {}
    for missing in [(0,), (2, 3), (4, 5)]:
        old, new = views(model, [missing, ()])
        prompt, steps = list(range(20, 40)), [41, 42, 43]
        context = begun(model, old, Naive(), prompt, [])
        Naive().carry(context, new)
        naive = decoded(context, steps)
        for view in (old, new):
            worst[missing, view.stage] = float((naive - fresh(model, view, prompt, steps)).abs().max())
    assert min(worst.values()) > 0.05, worst


@pytest.mark.parametrize("adapters", [(1,), (1, 2), (2,)], ids=str)
def test_from_boundary_falls_back_where_the_adapter_changes(stage, views, adapters):
    staged = stage(adapters=adapters)
    model = staged.served.model
    folders = [staged.adapters.get(number) for number in (1, 2, 3)]
    policy, made = FromBoundary(), views(staged.served.model, [(2, 3, 4), (4,), ()], folders)
    context = begun(model, made[0], policy, [5, 6, 7], [8])
    for view in made[1:]:
        same = context.view.layers[0] is view.layers[0]
        kept = context.cache.layers[0].keys.clone()
        policy.carry(context, view)
        assert torch.equal(context.cache.layers[0].keys, kept) == same
        ids = list(context.ids)
        torch.testing.assert_close(decoded(context, [9, 10]), fresh(model, view, ids, [9, 10]), **EXACT)


def test_from_boundary_runs_nothing_below_the_boundary(model, views):
    old, new = views(model, [(3, 4), ()])
    context = begun(model, old, FromBoundary(), [5, 6, 7], [8, 9])
    assert context.keep == 3 and context.kept_bytes == 5 * 32 * 4
    ran, keys = [], [layer.keys for layer in context.cache.layers[:3]]
    handles = [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(new.layers)]
    FromBoundary().carry(context, new)
    for handle in handles:
        handle.remove()
    assert ran == [3, 4, 5]
    assert all(layer.keys is before for layer, before in zip(context.cache.layers, keys, strict=False))


def test_what_is_kept_is_what_will_be_needed(model, views):
    whole, old = views(model, [(), (3, 4)])
    assert FromBoundary().keep(whole) is None and FromBoundary().keep(old) == 3
    assert PrefillAgain().keep(old) is None and Naive().keep(old) is None and RequestBoundary().keep(old) is None
    assert begun(model, whole, FromBoundary(), [5, 6], [7]).kept_bytes == 0
    context = begun(model, old, FromBoundary(), [5], [6])
    old.activate(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
    assert context.kept_bytes == 2 * 32 * 4, "other sequences leave no trace in this one"


def test_from_boundary_begun_without_keeping(model, views):
    """A context that was not asked to keep anything is prefilled again instead."""
    old, new = views(model, [(3, 4), ()])
    context = Context(model, old)
    context.feed([5, 6, 7])
    FromBoundary().carry(context, new)
    torch.testing.assert_close(decoded(context, [9]), fresh(model, new, [5, 6, 7], [9]), **EXACT)


def test_when_the_norm_or_nothing_changes(stage, ids):
    """Weights that are refined in place are other modules: from the boundary is then from the start."""
    staged = stage(plan=lambda names: coarse_first(names, 6))
    skeleton = Skeleton(staged.folder, staged.manifest)
    coarse = StageLoad(staged.folder, staged.manifest, [1], [Link()], skeleton, skeleton.empty_view()).wait()
    exact = StageLoad(staged.folder, staged.manifest, [2], [Link()], skeleton, coarse).wait()
    prompt = ids[0].tolist()
    for policy in CORRECT:
        context = begun(skeleton.model, coarse, policy, prompt, [])
        policy.carry(context, exact)
        torch.testing.assert_close(decoded(context, [9]), fresh(skeleton.model, exact, prompt, [9]), **EXACT)
        policy.carry(context, exact)
        expected = fresh(skeleton.model, exact, [*prompt, 9], [10])
        torch.testing.assert_close(decoded(context, [10]), expected, **EXACT)
    assert lowest_changed(exact, exact) == 6


def test_contexts_take_turns(model, views):
    """Three sequences under three stages, a token each in turn, are as each alone."""
    made = views(model, [(2, 3, 4), (4,), ()])
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    steps = [20, 21, 22]
    alone = [fresh(model, view, prompt, steps) for view, prompt in zip(made, prompts, strict=True)]
    contexts = [begun(model, view, FromBoundary(), prompt, []) for view, prompt in zip(made, prompts, strict=True)]
    together = [torch.stack([context.feed([token]) for context in contexts]) for token in steps]
    for found, expected in zip(torch.stack(together, 1), alone, strict=True):
        assert torch.equal(found, expected)


def test_policies_by_name():
    assert {name: type(policy) for name, policy in TRANSITIONS.items()} == {
        "request boundary": RequestBoundary,
        "prefill again": PrefillAgain,
        "from boundary states": FromBoundary,
        "naive": Naive,
    }
    assert find_transition("naive").name == "naive"
    with pytest.raises(StageError, match="no transition policy 'none'; known: request boundary, prefill again"):
        find_transition("none")
