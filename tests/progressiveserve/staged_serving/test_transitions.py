"""A generation whose model changes under it: every policy against a fresh prefill by the better stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from coarse_plans import coarse_first
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loads import Loads

from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.progressiveserve.loading.views import changed
from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion
from firsttoken.progressiveserve.staged_serving.transitions import (
    ChangedLayers,
    FromBoundary,
    Naive,
    PrefillAgain,
    RequestBoundary,
)
from firsttoken_studies.progressiveserve.probe import Probe

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


class Bench:
    """Requests by hand over one model; each has blocks of its own until so many others have begun."""

    BLOCKS = 4

    def __init__(self, model) -> None:
        self.model = model
        self.executor = LiveExecutor(model, 16 * self.BLOCKS)
        self._begun = 0

    def view(self, modules, policy) -> StagedModelVersion:
        return StagedModelVersion(self.model, modules, policy)

    def begun(self, modules, policy, prompt: Sequence[int], more: Sequence[int] = ()) -> Probe:
        """A request of ``prompt`` and then single ``more`` tokens."""
        first = self.BLOCKS * (self._begun % 16)
        self._begun += 1
        probe = Probe(self.executor, self.view(modules, policy), range(first, first + self.BLOCKS))
        probe.feed(prompt)
        for token in more:
            probe.feed([token])
        return probe

    def carry(self, probe: Probe, modules, policy) -> None:
        probe.carry(self.view(modules, policy), policy)

    def fresh(self, modules, prompt: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
        """Logits of ``steps`` after a prefill of ``prompt`` by ``modules`` alone."""
        return decoded(self.begun(modules, Naive(), prompt), steps)

    def keys(self, probe: Probe, layer: int) -> torch.Tensor:
        """What the pool holds of a request at a layer."""
        return self.executor.pool.rows[probe._blocks, layer].flatten(0, 2)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes a bench of a model, whose own attention it has back at the end."""
    made: dict[int, Bench] = {}

    def make(model) -> Bench:
        if id(model) not in made:
            made[id(model)] = Bench(model)
        return made[id(model)]

    yield make
    for one in made.values():
        one.executor.close()


def decoded(probe: Probe, steps: Sequence[int]) -> torch.Tensor:
    return torch.stack([probe.feed([token]) for token in steps])


@pytest.mark.parametrize("policy", CORRECT, ids=lambda policy: policy.name)
@fast
@given(missing=removed(), prompt=tokens, more=tokens, steps=tokens)
def test_the_next_tokens_are_those_of_a_fresh_prefill(model, views, bench, policy, missing, prompt, more, steps):
    old, new, last = views(model, [*missing, ()])
    on = bench(model)
    probe = on.begun(old, policy, prompt, more)
    on.carry(probe, new, policy)
    assert probe.view.modules is new and probe.ids == prompt + more
    torch.testing.assert_close(decoded(probe, steps), on.fresh(new, prompt + more, steps), **EXACT)
    on.carry(probe, last, policy)  # two in a row, with tokens of both stages in it
    torch.testing.assert_close(decoded(probe, steps), on.fresh(last, prompt + more + steps, steps), **EXACT)
    assert probe.ids == prompt + more + steps + steps


@pytest.mark.parametrize("policy", CORRECT, ids=lambda policy: policy.name)
def test_two_in_a_row_without_a_token_between(model, views, bench, policy):
    first, second, last = views(model, [(2, 3, 4), (3, 4), ()])
    on = bench(model)
    probe = on.begun(first, policy, [5, 6, 7], [8])
    on.carry(probe, second, policy)
    on.carry(probe, last, policy)
    torch.testing.assert_close(decoded(probe, [9, 10]), on.fresh(last, [5, 6, 7, 8], [9, 10]), **EXACT)


@pytest.mark.parametrize("policy", CORRECT, ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_layers_that_come_in_any_order(make_model, views, bench, policy, kind):
    """The upper layer first: the lowest missing one is kept, and what lies above is computed twice."""
    model = make_model(kind, layers=DEPTH)
    on, (old, middle, last) = bench(model), views(model, [(1, 2, 4), (1, 2), ()])
    probe = on.begun(old, policy, [5, 6, 7], [8])
    for modules in (middle, last):
        on.carry(probe, modules, policy)
        ids = list(probe.ids)
        torch.testing.assert_close(decoded(probe, [9, 10]), on.fresh(modules, ids, [9, 10]), **EXACT)


@fast
@given(missing=removed(), prompt=tokens, more=tokens, steps=tokens)
def test_a_request_boundary_changes_nothing_at_all(model, views, bench, missing, prompt, more, steps):
    old, new, _ = views(model, [*missing, ()])
    on = bench(model)
    plain, carried = (on.begun(old, RequestBoundary(), prompt, more) for _ in range(2))
    on.carry(carried, new, RequestBoundary())
    new.activate(model)  # as another view's making does between any two tokens
    assert torch.equal(decoded(plain, steps), decoded(carried, steps))


def test_naive_is_wrong(model, views, bench):
    """Also where the token happens to be the same: the logits are those of neither stage."""
    worst, on = {}, bench(model)
    for missing in [(0,), (2, 3), (4, 5)]:
        old, new = views(model, [missing, ()])
        prompt, steps = list(range(20, 40)), [41, 42, 43]
        probe = on.begun(old, Naive(), prompt)
        on.carry(probe, new, Naive())
        naive = decoded(probe, steps)
        for view in (old, new):
            worst[missing, view.stage] = float((naive - on.fresh(view, prompt, steps)).abs().max())
    assert min(worst.values()) > 0.05, worst


@pytest.mark.parametrize("adapters", [(1,), (1, 2), (2,)], ids=str)
@pytest.mark.parametrize("policy", [FromBoundary(), ChangedLayers()], ids=lambda policy: policy.name)
def test_all_is_computed_again_where_the_adapter_changes(stage, views, bench, adapters, policy):
    staged = stage(adapters=adapters)
    model = staged.served.model
    folders = [staged.adapters.get(number) for number in (1, 2, 3)]
    on, made = bench(model), views(staged.served.model, [(2, 3, 4), (4,), ()], folders)
    probe = on.begun(made[0], policy, [5, 6, 7], [8])
    exact = True
    for modules in made[1:]:
        same = probe.view.modules.layers[0] is modules.layers[0]
        exact = exact and (not same or policy.name != "partial prefill")
        kept = on.keys(probe, 0).clone()
        on.carry(probe, modules, policy)
        assert torch.equal(on.keys(probe, 0), kept) == same
        ids = list(probe.ids)
        if exact:
            torch.testing.assert_close(decoded(probe, [9, 10]), on.fresh(modules, ids, [9, 10]), **EXACT)


@pytest.mark.parametrize(
    ("policy", "runs"), [(FromBoundary(), [3, 4, 5]), (ChangedLayers(), [3, 4])], ids=["boundary", "partial"]
)
def test_nothing_below_the_boundary_runs(model, views, bench, policy, runs):
    old, new = views(model, [(3, 4), ()])
    on = bench(model)
    probe = on.begun(old, policy, [5, 6, 7], [8, 9])
    assert probe.view.hidden_cache.layers == {3} and probe.kept_bytes >= 5 * 32 * 4
    ran, keys = [], [on.keys(probe, layer).clone() for layer in range(3)]
    handles = [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(new.layers)]
    on.carry(probe, new, policy)
    for handle in handles:
        handle.remove()
    assert ran == runs
    assert all(torch.equal(on.keys(probe, layer), before) for layer, before in enumerate(keys))


def test_partial_prefill_loses_what_lies_above(model, views, bench):
    """Exact where nothing does; else nearer to the better stage than to the pruned one, and right in the new layers."""
    on, prompt, steps = bench(model), list(range(20, 60)), [61, 62]
    for missing, exact in [((4, 5), True), ((2, 3), False)]:
        old, new = views(model, [missing, ()])
        probe = on.begun(old, ChangedLayers(), prompt)
        on.carry(probe, new, ChangedLayers())
        found = decoded(probe, steps)
        off = float((found - on.fresh(new, prompt, steps)).abs().max())
        assert (off <= EXACT["atol"]) == exact
        if not exact:
            assert off < float((on.fresh(old, prompt, steps) - on.fresh(new, prompt, steps)).abs().max())


def test_what_is_kept_is_what_will_be_needed(model, views, bench):
    whole, old, cut = views(model, [(), (3, 4), (1, 3, 4)])
    assert FromBoundary().keep(whole) == () and FromBoundary().keep(old) == (3,)
    assert ChangedLayers().keep(whole) == () and ChangedLayers().keep(cut) == (1, 3)
    assert PrefillAgain().keep(old) == Naive().keep(old) == RequestBoundary().keep(old) == ()
    on = bench(model)
    assert on.begun(whole, FromBoundary(), [5, 6], [7]).kept_bytes == 0
    probe = on.begun(old, FromBoundary(), [5], [6])
    on.fresh(old, [1, 2, 3], [4])
    assert probe.view.hidden_cache.of(0, 3).shape == (1, 2, 32), "other sequences leave no trace in this one"


def test_when_the_norm_or_nothing_changes(stage, ids, bench):
    """Weights that are refined in place are other modules: from the boundary is then from the start."""
    loads = Loads(stage(plan=lambda names: coarse_first(names, 6)))
    coarse, exact = loads.bring(1), loads.bring(2)
    on, prompt = bench(loads.model), ids[0].tolist()
    for policy in CORRECT:
        probe = on.begun(coarse, policy, prompt)
        on.carry(probe, exact, policy)
        torch.testing.assert_close(decoded(probe, [9]), on.fresh(exact, prompt, [9]), **EXACT)
        on.carry(probe, exact, policy)
        torch.testing.assert_close(decoded(probe, [10]), on.fresh(exact, [*prompt, 9], [10]), **EXACT)
    assert not changed(exact, exact)
