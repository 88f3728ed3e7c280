"""A stage drafts and the whole model verifies: whatever comes when, the final tokens are the whole model's own."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from dying_link import DyingLink
from growing import MOVING, bytes_until, events_of, greedy
from plain_tokens import check_greedy, judged
from torch import nn
from waiting import until

from firsttoken.engine import drafts as drafting
from firsttoken.engine import engine as engine_module
from firsttoken.engine.draws import accept_draft, choose, token_shares
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Phase, Sampling, ScheduledChunk
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.progressiveserve.loading.views import make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion, moving
from firsttoken.progressiveserve.staged_serving.transitions import TRANSITIONS, Naive, Transition

DEPTH, VOCABULARY = 4, 260
RULES = ("equal", "distribution")
NOISE = 0.02  # of a layer's weights: a stage with it says the whole model's token two times of three
SHARED = random.Random(0).choices(range(1, VOCABULARY), k=20)


class Growing:
    """A model of three stages: in the first a layer is missing or not yet exact, in the second the same layer is
    nearly so. ``plain`` is the whole model by its own modules."""

    def __init__(self, model: Any) -> None:
        self.plain, self.model = copy.deepcopy(model), model
        self.layers = list(model.model.layers)
        self.ends = {"embed_tokens": model.model.embed_tokens, "norm": model.model.norm, "lm_head": model.lm_head}
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.coarse, self.finer = (self._noisy(noise) for noise in (NOISE, NOISE / 8))

    def _noisy(self, noise: float) -> nn.Module:
        layer = copy.deepcopy(self.layers[2])
        for weight in layer.parameters():
            weight.data *= 1 + noise * torch.randn_like(weight)
        return layer

    def versions(self, policy: Transition, passed: bool) -> list[StagedModelVersion]:
        """The three stages under ``policy``; in the first the layer is ``passed`` by."""
        made = []
        for number, layer in enumerate((PassLayer() if passed else self.coarse, self.finer, self.layers[2]), start=1):
            base = [layer if i == 2 else one for i, one in enumerate(self.layers)]
            made.append(StagedModelVersion(self.model, make_view(number, base, self.ends, None), policy))
            made[-1].whole = number == 3
        return made


def _sampling(rng: random.Random, longest: int) -> Sampling:
    drawn = rng.random() < 0.5
    return Sampling(
        rng.randint(1, longest),
        temperature=rng.choice((0.3, 1.0)) if drawn else 0.0,
        top_p=rng.choice((0.8, 1.0)),
        seed=rng.randrange(1000),
        stop=tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 20)))),
        logprobs=rng.choice((None, 0, 3)),
        prompt_logprobs=rng.random() < 0.2,
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        verify=rng.choice(RULES),
    )


def check(growing: Growing, prompt: list[int], sampling: Sampling, said: list[int]) -> None:
    """Hold ``said`` to the whole model: by its greedy tokens, or by its draws with the seed's numbers."""
    plain = judged(growing.plain, prompt, said)
    if not (sampling.temperature or sampling.adjusts):
        assert check_greedy(said, plain) == len(said)
    elif sampling.verify == "equal" or not sampling.temperature:
        for place, token in enumerate(said):
            logits, before = plain.logits[place].double().numpy(), [*prompt, *said[:place]]
            wanted = choose(logits, sampling, before, place, sampling.numbers(place))
            if token != wanted and sampling.temperature:  # a number on the edge of both, as schedule 456 draws one
                sums = np.cumsum(token_shares(logits, sampling, before, place))
                number = sampling.numbers(place).random()
                near = sums[token] - number > -1e-4 and number - (sums[token - 1] if token else 0) > -1e-4
                assert near, f"token {place} of {said}"
            else:
                assert token == wanted, f"token {place} of {said}"


def perform(growing: Growing, seed: int) -> Counter:
    """Run the schedule of ``seed``; what happened on the way."""
    rng, seen = random.Random(seed), Counter()
    policy = rng.choice([one for one in TRANSITIONS.values() if not isinstance(one, Naive)])
    versions = growing.versions(policy, rng.random() < 0.3)
    asked = []
    for _ in range(rng.randint(1, 4)):
        own = rng.choices(range(1, VOCABULARY), k=rng.randint(1, 8))
        asked.append((SHARED[: rng.choice((0, rng.randint(1, 20)))] + own, _sampling(rng, 12)))
    size = rng.randint(1, 8)
    config = EngineConfig(
        scheduler=rng.choice(sorted(SCHEDULERS)),
        preemption=rng.choice(("swap", "recompute")),
        watermark=0.0,
        requests=8,
        token_budget=rng.randint(8, 24),
        prefill_tokens=rng.randint(1, 40),
        share_prefixes=rng.random() < 0.4,
    )
    longest = max(len(prompt) + sampling.max_tokens for prompt, sampling in asked)
    blocks = -(-longest // size) + rng.choice((0, rng.randint(0, 20)))
    arrives = sorted(rng.sample(range(30), 2))
    leaves = {rng.randrange(30): rng.randrange(len(asked)) for _ in range(rng.choice((0, 0, 1)))}
    with closing(LiveExecutor(growing.model, blocks, block_tokens=size, host_blocks=rng.choice((0, 60)))) as executor:
        executor.version = versions[0]
        engine = Engine(executor, config)
        requests = [engine.submit(prompt, sampling) for prompt, sampling in asked]
        final: dict[int, list[int]] = {request.number: [] for request in requests}
        for step in range(10_000):
            for version, at in zip(versions[1:], arrives, strict=True):
                if step == at:
                    seen["waited for the whole model"] += sum(one.phase is Phase.DRAFTED for one in requests)
                    assert engine.publish(version, moving(policy)) == []
            if step in leaves and not requests[leaves[step]].finished:
                engine.cancel(requests[leaves[step]])
                seen["left"] += 1
            before = {request.number: request.draft_count for request in requests}
            for request, token in engine.step() if engine.busy else ():
                seen["drafts" if request.drafting else "final"] += 1
                if not request.drafting:
                    final[request.number].append(token)
            for request in requests:
                if request.version is versions[2] and before[request.number] and not request.draft_count:
                    seen["verified"] += 1
                taken = len(request.output) - request.draft_count
                assert final[request.number] == request.output[:taken] and len(request.times_s) == taken
            engine.pool.check()
            if not engine.busy and step > max(arrives):
                break
        assert engine.pool.free == engine.pool.count
        seen["preempted"] += sum(request.preemptions for request in requests)
        seen["shared"] += engine.prefixes is not None and engine.prefixes.hit_tokens > 0
    for request, (prompt, sampling) in zip(requests, asked, strict=True):
        said = final[request.number]
        if request not in [requests[number] for number in leaves.values()]:
            assert len(said) == sampling.max_tokens or said[-1] in sampling.stop
            if sampling.logprobs is not None:
                assert len(request.token_logprobs) == len(said)
            if sampling.prompt_logprobs:
                assert len(request.prompt_logprobs) == len(prompt) - 1
        if said:
            check(growing, prompt, sampling, said)
            own = judged(growing.plain, prompt, said).logits.log_softmax(-1)
            for place, one in enumerate(request.token_logprobs[: len(said)]):
                assert one.logprob == pytest.approx(float(own[place, said[place]]), abs=1e-3)
    return seen


@pytest.fixture
def growing(make_model) -> Growing:
    return Growing(make_model(layers=DEPTH))


@pytest.mark.long(seconds=20)
def test_every_schedule_ends_in_the_whole_models_tokens(growing: Growing) -> None:
    """250 of them: every scheduler, both rules, drawn and greedy, preempted, shared, cancelled, in pieces."""
    seen: Counter = Counter()
    for seed in range(int(os.environ.get("SCHEDULES", 250))):
        seen += perform(growing, seed)
    for what in ("waited for the whole model", "left", "preempted", "shared", "verified"):
        assert seen[what] >= 20, f"the schedules are too tame: {seen}"
    assert seen["drafts"] >= 500 and seen["final"] >= 500, seen


def _keeps_all(settle: Callable) -> Callable:
    def settled(chunk: ScheduledChunk, token: int, now_s: float):
        chunk.request.correction = None
        return settle(chunk, token, now_s)

    return settled


def _one_more(settle: Callable) -> Callable:
    def settled(chunk: ScheduledChunk, token: int, now_s: float):
        request = chunk.request
        if request.correction is not None and request.correction[0] < len(request.tokens) - 1:
            request.correction = request.correction[0] + 1, request.correction[1]
        return settle(chunk, token, now_s)

    return settled


@pytest.mark.parametrize("spoil", [_keeps_all, _one_more], ids=["every draft stays", "one draft too many stays"])
def test_these_schedules_notice(growing: Growing, monkeypatch, spoil: Callable) -> None:
    monkeypatch.setattr(engine_module, "settle", spoil(engine_module.settle))
    with pytest.raises(AssertionError):
        for seed in range(120):
            perform(growing, seed)


# -- the rule of acceptance


@pytest.mark.long(seconds=20)
@pytest.mark.parametrize("rule", RULES)
def test_what_stays_is_distributed_as_the_whole_models(rule: str) -> None:
    """10^5 draws of two tokens from five, of a draft by another model: each pair as often as the whole model says it
    (chi-square with 24 degrees of freedom, p above 0.001)."""
    rng = np.random.default_rng(1)
    draft, whole = rng.normal(size=(6, 5)), rng.normal(size=(6, 5))  # logits after nothing, and after each token
    draft = whole + 0.7 * draft
    counts, stays, draws = np.zeros((5, 5)), 0, 100_000
    for seed in range(draws):
        sampling = Sampling(3, temperature=0.8, top_p=0.9, seed=seed, verify=rule)
        numbers, said, shares = sampling.numbers(), [], []
        for _ in range(2):
            logits = draft[said[-1] + 1 if said else 0]
            shares.append(token_shares(logits, sampling, said, 0).astype("float32"))
            said.append(choose(logits, sampling, said, 0, numbers))
        final: list[int] = []
        while len(final) < 2:
            place = len(final)
            logits = whole[final[-1] + 1 if final else 0]
            if final != said[:place]:
                own = sampling.numbers(place) if rule == "equal" else numbers
                final.append(choose(logits, sampling, final, place, own))
            elif rule == "equal":
                final.append(choose(logits, sampling, final, place, sampling.numbers(place)))
            else:
                final.append(
                    accept_draft(said[place], shares[place], token_shares(logits, sampling, final, place), numbers)
                )
        counts[final[0], final[1]] += 1
        stays += final[0] == said[0]
    sampling = Sampling(3, temperature=0.8, top_p=0.9)
    first = token_shares(whole[0], sampling, [], 0)
    expected = draws * np.array([first[one] * token_shares(whole[one + 1], sampling, [], 0) for one in range(5)])
    assert not counts[expected == 0].any()
    likely = expected > 0
    chi = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi < 51.2, chi
    if rule == "distribution":
        overlap = np.minimum(first, token_shares(draft[0], sampling, [], 0)).sum()
        assert stays / draws == pytest.approx(overlap, abs=0.01)


def test_as_many_drafts_are_weighed_as_are_remembered(growing: Growing) -> None:
    versions = growing.versions(TRANSITIONS["prefill again"], False)
    with closing(LiveExecutor(growing.model, 60)) as executor:
        executor.version = versions[0]
        engine = Engine(executor)
        request = engine.submit([1, 2, 3], Sampling(200, temperature=1.0, verify="distribution"))
        certain = engine.submit([1, 2, 3], Sampling(200, verify="distribution"))
        engine.run()
        assert (request.draft_count, certain.draft_count) == (drafting.MOST_WEIGHED, 199)
        assert len(request.draft_shares) == drafting.MOST_WEIGHED and not certain.draft_shares
        assert engine.open_requests == 2 and engine.pool.free == 60
        engine.publish(versions[2], moving(TRANSITIONS["prefill again"]))
        engine.run()
        assert len(request.output) == len(certain.output) == 200 and not request.draft_shares
        check(growing, [1, 2, 3], certain.sampling, certain.output)


# -- the server


@pytest.mark.parametrize("policy", ["prefill again", "from boundary states", "request boundary"])
def test_a_server_sends_drafts_of_its_stages_and_then_the_whole_models_tokens(stage, serve, policy) -> None:
    """Stages with adapters of their own, each behind a link that waits for the drafts of the one before."""
    staged = stage(adapters=(1, 2))
    dying = DyingLink(bytes_until(staged, 1))
    server = serve(staged, dying, TRANSITIONS[policy])
    sessions = [server.submit(prompt, Sampling(24, verify="equal")) for prompt in MOVING]
    until(lambda: all(one.request and one.request.phase is Phase.DRAFTED for one in sessions), "all have drafted")
    dying.restore()
    for prompt, session in zip(MOVING, sessions, strict=True):
        events = events_of(session)
        said = [event.token_id for event in events if not event.draft]
        assert check_greedy(said, greedy(staged.folder, prompt, 24)) == 24
        assert {event.stage for event in events if not event.draft} == {3}
        assert [event.draft for event in events] == [True] * 23 + [False] * 24 and events[0].stage == 1
    assert server.status()["sessions"] == 0
