"""Everything at once: stages that arrive while others run, caches from elsewhere, shared prefixes, preemptions, clients
that leave, at any step. Each token is the one that what its request has cached leads to, and every block comes back."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from courses import Course, Rules, Standing, logits_of
from dying_link import DyingLink
from plain_tokens import Plain, check_greedy, judged

from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import MOVED, Action
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.trace import Trace
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.passlayer import pass_layers
from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion, moving
from firsttoken.progressiveserve.staged_serving.transitions import (
    TRANSITIONS,
    FromBoundary,
    Naive,
    PrefillAgain,
    Transition,
)

DEPTH, VOCABULARY = 6, 260
STAGES = [(2, 3, 4), (3, 4), ()]  # what is missing in each
BEGINNING = random.Random(0).choices(range(1, VOCABULARY), k=20)  # stored by a sender, and shared
GROUPS = [Group(0, 0), Group(0, 2), Group(2, 4), Group(3, DEPTH), Group(0, DEPTH)]


@dataclass(frozen=True)
class Asked:
    """A request: whether it ``moves``, and the group of a stored beginning, over a link that may die, or None."""

    prompt: list[int]
    new: int
    moves: bool
    group: Group | None = None
    link: Link | None = None


@dataclass(frozen=True)
class Schedule:
    """What is asked for, when stages arrive and clients leave, and how the pool is shared."""

    asked: list[Asked]
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
        longest = max(len(asked.prompt) + asked.new for asked in self.asked)
        return -(-longest // self.block_tokens) + self.spare


def _asked(rng: random.Random) -> Asked:
    own = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 12))]
    new, moves = rng.randint(1, 12), rng.random() < 0.7
    if rng.random() < 0.3:
        link = rng.choice((None, None, Link(), DyingLink(rng.randint(0, 15_000))))
        return Asked(BEGINNING[: rng.randint(4, 20)] + own, new, moves, rng.choice(GROUPS), link)
    return Asked(BEGINNING[: rng.choice((0, rng.randint(1, 20)))] + own, new, moves)


def draw(seed: int, policy: Transition | None = None) -> Schedule:
    """By ``seed`` alone."""
    rng = random.Random(seed)
    asked = [_asked(rng) for _ in range(rng.randint(1, 5))]
    early = rng.randint(0, 8)
    return Schedule(
        asked=asked,
        arrives=(early, early + rng.randint(0, 6)),
        leaves={rng.randint(0, 12): rng.randrange(len(asked)) for _ in range(rng.choice((0, 0, 1, 2)))},
        policy=policy or rng.choice([one for one in TRANSITIONS.values() if not isinstance(one, Naive)]),
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
            resume=rng.choice(("in_order", "in_order", "any_that_fits", "shortest_first")),
            share_prefixes=rng.random() < 0.4,
        ),
    )


class Model:
    """One set of weights, its three stages as modules for the engine, and each stage as plain transformers runs it.

    Another model of the same shape has computed ``BEGINNING``, and a store in ``folder`` keeps that.
    """

    def __init__(self, model: Any, views: Any, sender: Any, folder: Path) -> None:
        self.plain = [copy.deepcopy(model) for _ in STAGES]
        for plain, missing in zip(self.plain, STAGES, strict=True):
            pass_layers(plain, missing)
        self.sent = full_prefill(sender, Prefix.of([BEGINNING]), (2, 3))
        self.receiver, self.sender = identify(model, None, "receiver"), identify(sender, None, "sender")
        self.store = KVStore(folder, memory_bytes=1 << 24, disk_bytes=1 << 24, block_tokens=4)
        self.store.store(BEGINNING, self.sender, self.sent)
        self.model, self.stages = model, views(model, STAGES)

    def source(self, asked: Asked) -> StoredPrefix | None:
        """What is stored of how it begins."""
        if asked.group is None:
            return None
        between = {"sender": self.sender, "receiver": self.receiver}
        return StoredPrefix(self.store, asked.prompt, **between, group=asked.group, link=asked.link)

    def perform(self, schedule: Schedule) -> Counter:
        """Run ``schedule``, hold each token to what its request had cached, and count what happened on the way."""
        executor = LiveExecutor(
            self.model, schedule.blocks, block_tokens=schedule.block_tokens, host_blocks=schedule.host_blocks
        )
        with closing(executor):
            run = Run(self, schedule, executor)
            run.to_the_end()
            assert not run.engine.busy and run.engine.pool.free == run.engine.pool.count
            assert all(view.hidden_cache is None or view.hidden_cache.nbytes == 0 for view in run.views), (
                "states of the dead"
            )
            if executor.host_pool is not None:
                executor.host_pool.check()
        return run.judge()

    def check(self, prompt: list[int], said: list[tuple[int, int, Course]]) -> None:
        """Each token is what follows all before it, with keys and values as they were made."""
        tokens = [token for token, *_ in said]
        for stage, course in {(stage, course) for _, stage, course in said}:
            if course.plain:
                logits = judged(self.plain[stage - 1], prompt, tokens).logits
            else:
                logits = logits_of(course, self.plain, self.sent, [*prompt, *tokens], len(tokens)).float()
            places = [place for place, (_, *by) in enumerate(said) if by == [stage, course]]
            told = Plain([tokens[place] for place in places], logits[places])
            assert check_greedy(told.tokens, told) == len(places)


class Run:
    """One schedule under way: what each request has said, and by which course."""

    def __init__(self, model: Model, schedule: Schedule, executor: LiveExecutor) -> None:
        self.model, self.schedule, self.trace = model, schedule, Trace()
        self.rules = Rules(STAGES, DEPTH, schedule.policy.name)
        self.views = [StagedModelVersion(model.model, stage, schedule.policy) for stage in model.stages]
        executor.version = self.views[0]
        self.engine = Engine(executor, schedule.config, trace=self.trace)
        self.asked: dict[Request, Asked] = {}
        for asked in schedule.asked:
            source = model.source(asked)
            request = self.engine.submit(asked.prompt, Sampling(asked.new), moves=asked.moves, source=source)
            self.asked[request] = asked
        pending = self.engine.scheduler.pending
        self.brought = {one: pending[one.number].tokens for one in self.asked if one.number in pending}
        self.said: dict[Request, list[tuple[int, int, Course]]] = {request: [] for request in self.asked}
        self.courses: dict[Request, Course] = {}  # of those that have begun
        self.left: set[Request] = set()
        self.seen: Counter = Counter()
        evict, preemptor = self.engine.preemptor.evict, self.engine.preemptor

        def watched(victim: Request) -> Action:
            action = evict(victim)
            self.seen[str(action)] += 1
            if action is Action.RECOMPUTE:
                self._own(victim)
            return action

        preemptor.evict = watched

    def to_the_end(self) -> None:
        requests = list(self.asked)
        for step in range(100_000):  # a step may be a look at what a link has brought
            for stage, arrives in enumerate(self.schedule.arrives, start=2):
                if step == arrives:
                    self._publish(stage)
            if step in self.schedule.leaves and not requests[self.schedule.leaves[step]].finished:
                self.left.add(requests[self.schedule.leaves[step]])
                self.engine.cancel(requests[self.schedule.leaves[step]])
            if not self.engine.busy:
                break
            produced = self.engine.step()
            for request in self.asked:
                if request.fell_back and request in self.brought:
                    self.seen["fell back"] += 1
                    self._own(request)
            for request, token in produced:
                self.said[request].append((token, request.version.stage, self._course(request)))
            self.engine.pool.check()

    def _publish(self, stage: int) -> None:
        shares = self.schedule.config.share_prefixes
        pending = self.engine.scheduler.pending
        before = {
            request: (
                request.version.stage,
                self._course(request),
                Standing.of(request, shares=shares, awaits=request.number in pending),
            )
            for request in self.asked
            if request.moves and request.version is not None and not request.finished
        }
        assert self.engine.publish(self.views[stage - 1], moving(self.schedule.policy)) == []
        for request, (old, course, standing) in before.items():
            if request.version.stage != old:
                if standing.afresh:
                    self.brought.pop(request, None)
                self.courses[request] = self.rules.moved(course, old, stage, standing)

    def _own(self, request: Request) -> None:
        """It computes everything itself from now on."""
        self.brought.pop(request, None)
        self.courses.pop(request, None)

    def _course(self, request: Request) -> Course:
        """That of a request which has begun."""
        if request not in self.courses:
            stage = request.version.stage
            if request in self.brought:
                made = self.rules.brought(stage, self.asked[request].group, self.brought[request])
            else:
                made = self.rules.own(stage)
            self.courses[request] = made
        return self.courses[request]

    def judge(self) -> Counter:
        """Hold every token to its course; what happened in this run."""
        seen = self.seen + Counter(recovery.reason for recovery in self.trace.recoveries)
        for request, asked in self.asked.items():
            said = self.said[request]
            assert len(said) == asked.new or request in self.left
            stages = [stage for _, stage, _ in said]
            assert stages == sorted(stages) and (asked.moves or len(set(stages)) <= 1), "it moved back, or was moved"
            seen[f"{len(set(stages))} stages"] += 1
            courses = {course for *_, course in said}
            seen["brought"] += any(course.group is not None for course in courses)
            seen["brought and moved"] += any(course.group is not None and course.redone for course in courses)
            seen["some layers again"] += any(bool(course.redone) for course in courses)
            self.model.check(asked.prompt, said)
        seen["left"] += len(self.left)
        seen["shared"] += self.engine.prefixes is not None and self.engine.prefixes.hit_tokens > 0
        return seen


@pytest.fixture
def grown(make_model, views, tmp_path) -> Model:
    return Model(make_model(layers=DEPTH), views, make_model(layers=DEPTH, seed=1), tmp_path / "store")


@pytest.mark.long(seconds=20)
def test_every_schedule_gives_the_tokens_of_what_was_cached(grown: Model) -> None:
    """400 of them: every scheduler and right policy, swapped, recomputed, shared, brought, cancelled, in pieces."""
    seen: Counter = Counter()
    for seed in range(400):
        seen += grown.perform(draw(seed))
    often = (MOVED, "2 stages", "3 stages", "swap", "recompute", "brought", "some layers again", "left", "shared")
    for what in (*often, "fell back"):
        assert seen[what] >= 20, f"the schedules are too tame: {seen}"
    assert seen["brought and moved"] >= 5, seen


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


def _late(redo: Callable) -> Callable:
    def late(view: StagedModelVersion, request: Request, layers: range):
        found = redo(view, request, layers)
        return found if found.hidden is None else found._replace(hidden=found.hidden.roll(1, dims=1))

    return late


def _upside_down(arrived: Callable) -> Callable:
    return lambda source: [(layer, kv.flip(0)) for layer, kv in arrived(source)]


@pytest.mark.parametrize(
    ("of", "name", "spoil", "policy"),
    [
        (StagedModelVersion, "redo", _late, FromBoundary()),
        (HiddenStateCache, "covers", lambda covers: lambda *_: True, TRANSITIONS["partial prefill"]),
        (StoredPrefix, "arrived", _upside_down, None),
        (Engine, "_salt", lambda salt: lambda *_: "one for all", None),
    ],
    ids=["hidden states a token late", "states that began later", "keys for values", "blocks of another view"],
)
def test_these_schedules_notice(grown, monkeypatch, of: type, name: str, spoil: Callable, policy) -> None:
    """More controls, one a part."""
    monkeypatch.setattr(of, name, spoil(getattr(of, name)))
    with pytest.raises(AssertionError, match=r"wins by|no hidden states"):
        for seed in range(80):
            grown.perform(draw(seed, policy))


def test_a_move_stalls_nobody(grown: Model) -> None:
    """Eight run, four of them move: the others get a token in every step, and no step exceeds the budget."""
    config = EngineConfig(scheduler="sarathi", watermark=0.0, requests=8, token_budget=16)
    with closing(LiveExecutor(grown.model, 140, block_tokens=4)) as executor:
        views = [StagedModelVersion(grown.model, stage, PrefillAgain()) for stage in grown.stages]
        executor.version, trace = views[0], Trace()
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
        assert [request.version.stage for request in requests] == [3] * 4 + [1] * 4


def test_who_cannot_move_is_told_and_the_others_go_on(grown: Model) -> None:
    with closing(LiveExecutor(grown.model, 40, block_tokens=4)) as executor:
        old = StagedModelVersion(grown.model, grown.stages[0], PrefillAgain())  # keeps no edge
        executor.version = old
        engine = Engine(executor, EngineConfig(watermark=0.0))
        moving_one, other = (engine.submit([1, 2, 3], Sampling(8), moves=moves) for moves in (True, False))
        engine.step()
        ((lost, error),) = engine.publish(
            StagedModelVersion(grown.model, grown.stages[1], FromBoundary()), lambda *_: range(2, DEPTH)
        )
        assert lost is moving_one and lost.finished
        assert "no hidden states of request 0 are kept at layer 2 (layers: none)" in str(error)
        engine.run()
        assert len(other.output) == 8 and engine.pool.free == engine.pool.count
