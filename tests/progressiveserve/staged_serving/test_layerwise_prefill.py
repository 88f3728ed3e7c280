"""Prompts follow the layers of a model as they arrive: their tokens are the whole model's own, and come soon after."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from coarse_plans import coarse_first
from growing import TIMEOUT_S, bytes_until, events_of, part_path
from plain_tokens import TOLERANCE, check_greedy, judged
from waiting import until

from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Phase, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.checkpoint.plan import single_stage
from firsttoken.progressiveserve.passlayer import PassLayer, pass_layers
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.study.errors import RequestError
from firsttoken_extras.bitplanes.plane_plan import by_planes

DEPTH, MISSING = 5, (2, 3)
IN_BF16 = 0.05  # of logits up to 3, as both sides round
SHARED = random.Random(0).choices(range(1, 260), k=20)


class Arriving:
    """A model of which the first ``here`` layers have come: nothing else of it may run, nor its norm and head before
    the last. ``plain`` are the whole model and a stage without the layers ``MISSING``, by their own modules."""

    def __init__(self, model) -> None:
        self.plain = copy.deepcopy(model), copy.deepcopy(model)
        pass_layers(self.plain[1], MISSING)
        self.model, self.here, self.staged = model, DEPTH, False
        layers = list(model.model.layers)
        passed = [PassLayer() if i in MISSING else layer for i, layer in enumerate(layers)]
        self.stage = ModelVersion(Decoder(model, [LocalSegment(passed)]), stage=1)
        self.whole = ModelVersion(Decoder(model, [LocalSegment(layers)]), stage=2)
        self.whole.arrival = lambda: self.here
        for number, module in [*enumerate(layers), (DEPTH - 1, model.model.norm), (DEPTH - 1, model.lm_head)]:
            module.register_forward_pre_hook(partial(self._check, number))

    def _check(self, number: int, *_: object) -> None:
        assert self.here > number or (self.staged and number not in MISSING), f"layer {number} runs before it comes"


def perform(arriving: Arriving, seed: int) -> Counter:
    """Run the schedule of ``seed``, hold each answer to its model, and count what happened on the way."""
    rng, seen = random.Random(seed), Counter()
    arriving.staged, arriving.here = rng.random() < 0.6, DEPTH
    come = [2, 3, DEPTH] if arriving.staged else [*sorted(rng.sample(range(1, DEPTH), rng.randint(1, 3))), DEPTH]
    comes = dict(zip(sorted(rng.sample(range(30), len(come))), come, strict=True))
    asked = []
    for _ in range(rng.randint(1, 6)):
        prompt = SHARED[: rng.choice((0, rng.randint(1, 20)))] + rng.choices(range(1, 260), k=rng.randint(1, 8))
        sampling = Sampling(rng.randint(1, 12), prompt_logprobs=rng.random() < 0.2)
        version = arriving.whole if arriving.staged and rng.random() < 0.6 else None
        asked.append((rng.choice((0, rng.randrange(30))), prompt, sampling, version))
    size, leaves = rng.randint(1, 8), {rng.randrange(30): rng.randrange(len(asked)) for _ in range(rng.choice((0, 1)))}
    bounds = {"watermark": 0.0, "requests": rng.choice((2, 8)), "token_budget": rng.randint(8, 24)}
    policies = {"scheduler": rng.choice(sorted(SCHEDULERS)), "preemption": rng.choice(("swap", "recompute"))}
    config = EngineConfig(**bounds, **policies, prefill_tokens=rng.randint(1, 40), share_prefixes=rng.random() < 0.4)
    longest = max(len(prompt) + sampling.max_tokens for _, prompt, sampling, _ in asked)
    blocks = -(-longest // size) + rng.choice((0, rng.randint(0, 20)))
    with closing(LiveExecutor(arriving.model, blocks, block_tokens=size, host_blocks=rng.choice((0, 60)))) as executor:
        arriving.here, executor.version = 0, arriving.stage if arriving.staged else arriving.whole
        engine, requests, fails = Engine(executor, config), {}, rng.choice((-1, rng.randrange(12)))
        execute, ran = executor.execute, []

        def counted(chunks):
            ran.append(sum(chunk.redo is not None and chunk.redo.leave is not None for chunk in chunks))
            return [execute(chunks), *([1 // 0] if len(ran) == fails else [])][0]

        executor.execute, executor.wait_until = counted, lambda moment_s: None
        for step in range(5000):
            arriving.here = comes.get(step, arriving.here)
            if step == max(comes) and arriving.staged:
                assert engine.publish(arriving.whole, lambda old, new: None) == []
            for number, (at, prompt, sampling, version) in enumerate(asked):
                if at == step:
                    requests[number] = engine.submit(prompt, sampling, version=version)
            if leaves.get(step) in requests:
                seen["left"] += not requests[leaves[step]].finished
                engine.cancel(requests[leaves[step]])
            with suppress(ZeroDivisionError):  # a step that fails
                engine.step() if engine.busy else None
            engine.pool.check()
            if not engine.busy and step > 30:
                break
        assert engine.pool.free == engine.pool.count and not engine.busy and not engine.scheduler.pending
        preempted = sum(request.preemptions for request in requests.values())
        seen += Counter(followed=sum(ran), preempted=preempted, way=engine.scheduler.preempted - preempted)
    for number, (_, prompt, sampling, _) in enumerate(asked):
        said = requests[number].output
        if number not in leaves.values():
            assert len(said) == sampling.max_tokens and not requests[number].failure
            assert len(requests[number].prompt_logprobs) == (len(prompt) - 1 if sampling.prompt_logprobs else 0)
        model = arriving.plain[requests[number].version is arriving.stage]
        assert not said or check_greedy(said, judged(model, prompt, said)) == len(said)
    return seen


@pytest.fixture
def arriving(make_model) -> Arriving:
    return Arriving(make_model(layers=DEPTH))


@pytest.mark.long(seconds=13)
def test_every_schedule_ends_in_the_tokens_of_the_whole_model(arriving: Arriving) -> None:
    """150 of them: layers come at any step, with a stage that answers and without, in small pools; steps fail."""
    seen = sum((perform(arriving, seed) for seed in range(150)), Counter())
    assert seen["followed"] > 300 and seen["way"] > 10 and seen["left"] > 20 and seen["preempted"] > 20, seen


def test_these_schedules_notice_states_of_another_token(arriving: Arriving, monkeypatch) -> None:
    of = HiddenStateCache.of
    monkeypatch.setattr(HiddenStateCache, "of", lambda cache, *what: of(cache, *what).roll(1, 1))
    with pytest.raises(AssertionError):
        for seed in range(40):
            perform(arriving, seed)


def test_a_stored_beginning_does_not_go_with_layers_that_are_on_their_way(arriving: Arriving) -> None:
    with closing(LiveExecutor(arriving.model, 4)) as executor:
        arriving.here = 1
        with pytest.raises(RequestError, match="layers are on their way; leave it out"):
            Engine(executor).submit([1, 2], source=SimpleNamespace(tokens=1, redo=range(0)), version=arriving.whole)


PLANS = {"stages": {}, "one load": {"plan": lambda shapes: single_stage(shapes, 6)}}
PLANS["bits"] = {"plan": lambda shapes: by_planes(shapes, "bits"), "dtype": torch.bfloat16}
PLANS["bits, head"] = PLANS["bits"] | {"tied": False}


@pytest.mark.parametrize("coming", PLANS)
def test_each_of_64_prompts_lacks_one_step_when_the_last_layer_is_here(stage, serve, monkeypatch, coming) -> None:
    staged, plain = stage(**PLANS[coming]), coming == "one load"
    count, parts = len(staged.manifest.stages), staged.manifest.stages[-1].parts
    here = max(part.layer for part in parts if part.layer is not None)
    last = parts[[part.layer for part in parts].index(here) :]  # a layer, and a head behind it
    most = bytes_until(staged, count) - sum(part.bytes for part in last)
    let, book, began, execute = threading.Event(), Link._book, [], LiveExecutor.execute

    def booked(link: Link, wanted: int) -> tuple[int, float]:
        assert link.bytes_moved < most or let.wait(TIMEOUT_S)
        return book(link, wanted if let.is_set() else min(wanted, most - link.bytes_moved))

    load, wait = StagedServer._load_first, lambda server: until(lambda: len(server._open) == 64, "all have asked")
    monkeypatch.setattr(StagedServer, "_load_first", lambda server: wait(server) or load(server))
    monkeypatch.setattr(Link, "_book", booked)
    monkeypatch.setattr(LiveExecutor, "execute", lambda *step: (began.append(len(step[1])), execute(*step))[1])
    server = serve(staged, Link(LinkConfig(0.05)), threads=1, max_sessions=65)
    prompts = [[*SHARED[:6], *range(number, number + 1 + number % 6)] for number in range(64)]
    sessions = [server.submit(prompt, Sampling(2, verify="equal", drafts=plain)) for prompt in prompts]

    def stand() -> bool:
        pending = [*server._server._engine.scheduler.pending.values()] if server._server else []
        return sum(one.request.phase is Phase.RESTORING and one._reached == here for one in pending) == 64

    until(stand, "all stand before the last layers")
    if not plain:
        assert {event.stage for event in events_of(server.submit([5, 6], 4))} == {count - 1}, "it answers meanwhile"
    assert server.stats().waiting == 64 and (steps := len(began))
    let.set()
    for prompt, session in zip(prompts, sessions, strict=True):
        events = events_of(session)
        assert {(event.stage, event.draft) for event in events} == {(count, False)}
        said = [event.token_id for event in events]
        bits = "bits" in coming
        compared = check_greedy(said, judged(staged.served.model, prompt, said), IN_BF16 if bits else TOLERANCE)
        assert len(said) == 2 and (compared == 2 or bits), "in bf16 a tie ends the comparison"
    assert began[steps:] == [64, 64], "one step says the first token of all, the next the second"


def test_prompts_that_follow_bits_wait_for_those_that_come_damaged(stage, serve) -> None:
    staged = stage(**PLANS["bits"])
    path = part_path(staged, 2, 3)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    server = serve(staged)
    prompts = [[*SHARED[:count], 7] for count in (3, 9, 20)]
    sessions = [server.submit(prompt, Sampling(4, verify="equal", drafts=False)) for prompt in prompts]
    until(lambda: "wrong sha256" in (server.status()["error"] or ""), "the damage is told")
    assert {event.stage for event in events_of(server.submit([5, 6], 4))} == {1}, "it answers meanwhile"
    assert server.stats().waiting == 3
    path.write_bytes(content)
    for prompt, session in zip(prompts, sessions, strict=True):
        said = [event.token_id for event in events_of(session)]
        check_greedy(said, judged(staged.served.model, prompt, said), IN_BF16)


@pytest.mark.parametrize("options", [{"adapters": (1, 2, 3)}, {"plan": lambda names: coarse_first(names, 6)}])
def test_a_last_stage_that_changes_what_is_here_is_drafted_and_verified(stage, serve, options) -> None:
    server = serve(stage(**options))
    events = events_of(server.submit([5, 6, 7], Sampling(4, verify="equal", drafts=False)))
    assert sum(not event.draft for event in events) == 4 and server._final is None
