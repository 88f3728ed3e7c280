"""Stages that arrive while others run, are preempted, share prefixes, swap or leave: each token is its stage's own."""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from plain_tokens import Plain, check_greedy, judged

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.engine import Engine
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.preemptor import MOVED
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.trace import Trace
from firsttoken.progressive.passlayer import pass_layers
from firsttoken.progressive.recovery.transitions import FromBoundary, Naive, PrefillAgain, Transition
from firsttoken.progressive.recovery.views import GrownView, moving

DEPTH, VOCABULARY = 6, 260
STAGES = [(2, 3, 4), (3, 4), ()]  # what is missing in each


@dataclass(frozen=True)
class Schedule:
    """What is asked for, when stages arrive and clients leave, and how the pool is shared."""

    asked: list[tuple[list[int], int, bool]]  # prompt, new tokens, whether it moves
    arrives: tuple[int, int]  # the steps after which stages 2 and 3 do
    leaves: dict[int, int]  # step -> request
    policy: Transition
    block_tokens: int
    spare: int
    host_blocks: int
    config: EngineConfig

    @property
    def blocks(self) -> int:
        """That the longest needs, and some to spare."""
        longest = max(len(prompt) + new for prompt, new, _ in self.asked)
        return -(-longest // self.block_tokens) + self.spare


def draw(seed: int, policy: Transition | None = None) -> Schedule:
    """By ``seed`` alone."""
    rng = random.Random(seed)
    first = [rng.randrange(1, VOCABULARY) for _ in range(20)]
    asked = []
    for _ in range(rng.randint(1, 6)):
        own = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 12))]
        shared = first[: rng.choice((0, rng.randint(1, 20)))]
        asked.append((shared + own, rng.randint(1, 14), rng.random() < 0.7))
    early = rng.randint(0, 8)
    return Schedule(
        asked=asked,
        arrives=(early, early + rng.randint(0, 6)),
        leaves={rng.randint(0, 12): rng.randrange(len(asked)) for _ in range(rng.choice((0, 0, 1, 2)))},
        policy=policy or rng.choice((PrefillAgain(), FromBoundary())),
        block_tokens=rng.randint(1, 8),
        spare=rng.choice((0, rng.randint(0, 8), rng.randint(0, 30))),
        host_blocks=rng.choice((0, 4, 100)),
        config=EngineConfig(
            scheduler=rng.choice(sorted(SCHEDULERS)),
            preemption=rng.choice(("swap", "recompute")),
            watermark=0.0,
            requests=8,
            token_budget=rng.randint(8, 40),
            prefill_tokens=rng.randint(1, 60),
            overtake=rng.random() < 0.3,
            share_prefixes=rng.random() < 0.4,
        ),
    )


class Model:
    """One set of weights, its three stages as modules for the engine, and each stage as plain transformers runs it."""

    def __init__(self, model: Any, views: Any) -> None:
        self.plain = [copy.deepcopy(model) for _ in STAGES]
        for plain, missing in zip(self.plain, STAGES, strict=True):
            pass_layers(plain, missing)
        self.model, self.stages = model, views(model, STAGES)

    def perform(self, schedule: Schedule) -> Counter:
        """Run ``schedule``, hold each token to the stage that said it, and count what happened on the way."""
        executor = LiveExecutor(
            self.model, schedule.blocks, block_tokens=schedule.block_tokens, host_blocks=schedule.host_blocks
        )
        with closing(executor):
            views = [GrownView(self.model, stage, schedule.policy) for stage in self.stages]
            executor.view, trace = views[0], Trace()
            engine = Engine(executor, schedule.config, trace=trace)
            said: dict[Request, list[tuple[int, int]]] = {}
            for prompt, new, moves in schedule.asked:
                said[engine.submit(prompt, Sampling(new), moves=moves)] = []
            requests = list(said)
            lost: set[Request] = set()
            for step in range(1000):
                for stage, arrives in enumerate(schedule.arrives, start=1):
                    if step == arrives:
                        assert engine.publish(views[stage], moving(schedule.policy)) == []
                if step in schedule.leaves and not requests[schedule.leaves[step]].finished:
                    lost.add(requests[schedule.leaves[step]])
                    engine.cancel(requests[schedule.leaves[step]])
                if not engine.busy:
                    break
                for request, token in engine.step():
                    said[request].append((token, request.view.stage))
                engine.pool.check()
            assert not engine.busy and engine.pool.free == engine.pool.count
            assert all(view.edges is None or view.edges.nbytes == 0 for view in views), "hidden states of the dead"
            if executor.arena is not None:
                executor.arena.check()
        seen = Counter(recovery.reason for recovery in trace.recoveries)
        for request, (prompt, new, moves) in zip(requests, schedule.asked, strict=True):
            assert len(said[request]) == new or request in lost
            stages = [stage for _, stage in said[request]]
            assert stages == sorted(stages) and (moves or len(set(stages)) <= 1), "it moved back, or was moved"
            seen[f"{len(set(stages))} stages"] += 1
            self.check(prompt, said[request])
        return seen

    def check(self, prompt: list[int], said: list[tuple[int, int]]) -> None:
        """Each token is the one that its stage says after all before it."""
        tokens = [token for token, _ in said]
        for stage in {stage for _, stage in said}:
            plain = judged(self.plain[stage - 1], prompt, tokens)
            places = [place for place, (_, by) in enumerate(said) if by == stage]
            told = Plain([tokens[place] for place in places], plain.logits[places])
            assert check_greedy(told.tokens, told) == len(places)


@pytest.fixture
def grown(make_model, views) -> Model:
    return Model(make_model(layers=DEPTH), views)


@pytest.mark.long(seconds=25)
def test_every_schedule_gives_each_stages_own_tokens(grown: Model) -> None:
    """520 of them, every scheduler, both right policies, swapped, recomputed and shared."""
    seen: Counter = Counter()
    for seed in range(520):
        seen += grown.perform(draw(seed))
    for what in (MOVED, "policy", "2 stages", "3 stages"):
        assert seen[what] >= 20, f"the schedules are too tame: {seen}"


def test_these_schedules_notice_a_wrong_transition(grown: Model) -> None:
    """The control: keys and values of the pruned stage go on as they are."""
    caught = 0
    for seed in range(40):
        try:
            grown.perform(draw(seed, Naive()))
        except AssertionError as error:
            assert "wins by" in str(error)
            caught += 1
    assert caught >= 5


def test_these_schedules_notice_states_of_another_request(grown: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the edges: hidden states a token late."""
    redo = GrownView.redo

    def late(view, request, layers):
        found = redo(view, request, layers)
        return found if found.hidden is None else found._replace(hidden=found.hidden.roll(1, dims=1))

    monkeypatch.setattr(GrownView, "redo", late)
    with pytest.raises(AssertionError, match="wins by"):
        for seed in range(40):
            grown.perform(draw(seed, FromBoundary()))


def test_a_move_stalls_nobody(grown: Model) -> None:
    """Eight run, four of them move: the others get a token in every step, and no step exceeds the budget."""
    config = EngineConfig(scheduler="sarathi", watermark=0.0, requests=8, token_budget=16)
    with closing(LiveExecutor(grown.model, 140, block_tokens=4)) as executor:
        views = [GrownView(grown.model, stage, PrefillAgain()) for stage in grown.stages]
        executor.view, trace = views[0], Trace()
        engine = Engine(executor, config, trace=trace)
        requests = [engine.submit([number + 1] * 20, Sampling(40), moves=number < 4) for number in range(8)]
        while not all(request.times_s for request in requests):
            engine.step()
        engine.publish(views[2], moving(PrefillAgain()))
        begun = len(trace.steps)
        others = 0
        while any(request.redo for request in requests):
            before = [len(request.times_s) for request in requests[4:]]
            engine.step()
            assert [len(request.times_s) for request in requests[4:]] == [count + 1 for count in before]
            others += 1
        moved = trace.steps[begun : begun + others]
        assert others >= 5 and max(sum(new for _, new in step.prefills) + len(step.contexts) for step in moved) <= 16
        engine.run()
        assert [request.view.stage for request in requests] == [3] * 4 + [1] * 4


def test_who_cannot_move_is_told_and_the_others_go_on(grown: Model) -> None:
    with closing(LiveExecutor(grown.model, 40, block_tokens=4)) as executor:
        old = GrownView(grown.model, grown.stages[0], PrefillAgain())  # keeps no edge
        executor.view = old
        engine = Engine(executor, EngineConfig(watermark=0.0))
        moving_one, other = (engine.submit([1, 2, 3], Sampling(8), moves=moves) for moves in (True, False))
        engine.step()
        ((lost, error),) = engine.publish(
            GrownView(grown.model, grown.stages[1], FromBoundary()), lambda *_: range(2, DEPTH)
        )
        assert lost is moving_one and lost.finished
        assert "no hidden states of request 0 are kept at layer 2 (layers: none)" in str(error)
        engine.run()
        assert len(other.output) == 8 and engine.pool.free == engine.pool.count


def test_a_prompt_that_sixteen_share_is_prefilled_once(grown: Model) -> None:
    prompt = torch.arange(1, 65).tolist()
    with closing(LiveExecutor(grown.model, 400, block_tokens=4)) as executor:
        executor.view = GrownView(grown.model, grown.stages[2], PrefillAgain())
        engine = Engine(executor, EngineConfig(watermark=0.0, share_prefixes=True))
        requests = engine.serve([([*prompt, 100 + number], Sampling(4), 0.0) for number in range(16)])
        assert engine.books["prefill"] == 64 + 16 and engine.prefixes.found_tokens == 15 * 64
        for request in requests:
            grown.check(request.tokens[:65], [(token, 3) for token in request.output])
