"""Random schedules of everything that one engine does: a model in stages or on borrowed layers, fine-tunes of it beside
it, prefixes that others computed, preemption by cross-point, clients that leave. Tiny random weights, fp32.

Each token is the one that the plain model of its stage or variant has after all before it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from borrowing import TIMEOUTS, nothing_is_left
from dying_link import DyingLink
from everything import EXACT, STAGES, VARIANTS, Models, Watched
from swarms import DEPTH, Here

from firsttoken.cps.policies import make_policy
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.preemption.preemption_policy import MOVED, PreemptionPolicy
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.shared_base import SharedBase
from firsttoken.engine.trace import Trace
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.staged_serving.stage_versions import moving
from firsttoken.progressiveserve.staged_serving.transitions import (
    FromBoundary,
    Naive,
    PrefillAgain,
    RequestBoundary,
    Transition,
)
from firsttoken.study.errors import StageError
from firsttoken_cpu.cpu_accelerator import CPUAccelerator
from firsttoken_cpu.native.library import kernels
from firsttoken_extras.layer_borrowing.arrivals import LayerArrivals
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica
from firsttoken_serve.variants import LateVariants

pytestmark = pytest.mark.long(seconds=40)

SCHEDULES = 500
TOKENS, BLOCK_TOKENS = 10, 4
OFTEN = {  # how often each is seen at least
    "finished": 4 * SCHEDULES,
    "swap, policy": SCHEDULES // 4,
    "recompute, policy": SCHEDULES // 10,
    "recompute, host pool full": SCHEDULES // 20,
    f"recompute, {MOVED}": SCHEDULES // 2,
    "answer of several stages": SCHEDULES // 4,
    "borrowed steps": SCHEDULES,
    "foreign prefix": SCHEDULES,
    "layers of another's cache": 2 * SCHEDULES,
    "cancelled": SCHEDULES // 5,
    "shared tokens": SCHEDULES,
    **dict.fromkeys([*STAGES, *VARIANTS], SCHEDULES // 4),
    "first layers": SCHEDULES // 10,
    "all at once": SCHEDULES // 125,
}


def _executor(models: Models, rng: random.Random) -> Watched:
    blocks, host_blocks = rng.choice((10, 11, 13, 18)), rng.choice((0, 6, 100, 100))
    return Watched(models.model, blocks, block_tokens=BLOCK_TOKENS, host_blocks=host_blocks)


def _config(rng: random.Random, shares: float) -> EngineConfig:
    return EngineConfig(
        scheduler=rng.choice(sorted(SCHEDULERS)),
        watermark=0.0,
        requests=8,
        token_budget=rng.randint(9, 40),
        prefill_tokens=rng.randint(9, 60),
        share_prefixes=rng.random() < shares,
    )


def _cross_point(rng: random.Random) -> PreemptionPolicy:
    return make_policy("cross_point", threshold=rng.choice((20, 24, 28, 100)))


def _link(rng: random.Random) -> Link | None:
    return rng.choice((None, None, Link(), DyingLink(rng.randint(0, 20_000))))


class InStages:
    """A model whose stages arrive while it serves, with variants on the last one."""

    def __init__(self, models: Models, rng: random.Random, policy: Transition | None = None) -> None:
        self.models, self.rng, self.trace = models, rng, Trace()
        self.policy = policy or rng.choice((PrefillAgain(), FromBoundary(), RequestBoundary()))
        executor = _executor(models, rng)
        self.stages = [models.version(name, self.policy) for name in STAGES]
        self.names: dict[ModelVersion, str] = dict(zip(self.stages, STAGES, strict=True))
        self.late = LateVariants(models.adapters, "cpu")
        self.late.read(models.folder, "", models.layers)
        self.hosted: dict[str, ModelVersion] = {}
        self.engine = Engine(executor, _config(rng, 0.3), policy=_cross_point(rng), trace=self.trace)
        self.arrives = sorted((rng.randint(0, 8), rng.randint(0, 16)))
        self._serve(0)
        self.step, self.close = self.engine.step, executor.close

    def _serve(self, stage: int) -> None:
        version = self.stages[stage]
        if self.models.fused and self.rng.random() < 0.7:
            version.use_fused(self.models.fused)
        if stage == 0:
            self.engine.executor.version = version
            return
        assert self.engine.publish(version, moving(self.policy)) == []
        if version is self.stages[-1]:
            self.hosted = self.late.host(version, self.engine.executor, lambda compare: None)
            self.names |= {variant: name for name, variant in self.hosted.items()}
            self._fusing = self.late.fuse() if self.models.fused else iter(())

    def advance(self, step: int) -> None:
        """Let come what comes before this step."""
        while self.arrives and self.arrives[0] <= step:
            self.arrives.pop(0)
            self._serve(len(self.stages) - 1 - len(self.arrives))
        if self.hosted and self.rng.random() < 0.3:
            next(self._fusing, None)

    def submit(self, prompt: list[int]) -> tuple[Request, bool]:
        """A request of any kind that can be had now, and whether it was offered another's cache."""
        rng, kind = self.rng, self.rng.choice(["whole" if self.hosted else "in stages", *self.hosted])
        source: StoredPrefix | None = None
        if rng.random() < 0.4:
            sender, group = rng.choice(EXACT[kind])
            source = self.models.senders.source(prompt, group, sender, _link(rng))
        options = {"version": self.hosted[kind]} if kind in VARIANTS else {"moves": rng.random() < 0.7}
        return self.engine.submit(prompt, Sampling(TOKENS), source=source, **options), source is not None

    def finish(self, seen: Counter) -> None:
        """Find nothing that is kept of requests that are over."""
        assert all(stage.hidden_cache is None or not stage.hidden_cache.nbytes for stage in self.stages)
        seen["engines in stages"] += 1


class OnLoan:
    """A replica whose layers come while a neighbour lends the others, with variants once all are there; some requests
    are content with the first layers and borrow none."""

    def __init__(self, models: Models, rng: random.Random, neighbour: Here) -> None:
        self.models, self.rng, self.trace = models, rng, Trace()
        self.arrivals = LayerArrivals(DEPTH)
        lenders = [Lender(neighbour.server.record.address, range(DEPTH))]
        lease = Lease(lenders, neighbour.model, DEPTH, models.model.config.hidden_size, timeouts=TIMEOUTS)
        # shared prefixes are refused by a replica that borrows
        executor, config, policy = _executor(models, rng), _config(rng, 0.0), _cross_point(rng)
        self.first_layers = models.version("first layers", RequestBoundary())
        self.replica = BorrowingReplica(
            executor, models.layers, self.arrivals, lease, config, policy=policy, trace=self.trace
        )
        self.names: dict[ModelVersion, str] = {self.first_layers: "first layers"}
        self.hosted: dict[str, ModelVersion] = {}
        self.engine, self.step, self.close = self.replica.engine, self.replica.step, self.replica.close
        self.arrivals.come()
        self.comes = sorted(rng.choice((0, rng.randint(0, 25))) for _ in range(DEPTH))

    def advance(self, step: int) -> None:
        """Let come what comes before this step."""
        while self.comes and self.comes[0] <= step:
            self.comes.pop(0)
            self.arrivals.come()
        if self.replica.here == DEPTH and not self.hosted:
            executor, models = self.engine.executor, self.models
            executor.version = base = SharedBase(executor.version.decoder)
            self.hosted = {name: base.variant(executor.model, models.adapter(name)) for name in models.adapters}
            self.names |= {variant: name for name, variant in self.hosted.items()}
            self._fusing = base.fuse() if self.models.fused else iter(())
        if self.hosted and self.rng.random() < 0.5:
            next(self._fusing, None)

    def submit(self, prompt: list[int]) -> tuple[Request, bool]:
        """A request of any kind that can be had now, and whether it was offered another's cache."""
        rng, senders, sampling = self.rng, self.models.senders, Sampling(TOKENS)
        kinds = ["whole", "whole", *(["in stages"] if self.replica.here > 1 else []), *self.hosted]
        kind, offered = rng.choice(kinds), rng.random() < 0.4
        sender, group = rng.choice(EXACT[kind])
        if kind == "whole":
            offer = senders.offer(prompt, group, sender, _link(rng)) if offered else None
            return self.replica.submit(prompt, sampling, offer=offer), offered
        source = senders.source(prompt, group, sender, _link(rng)) if offered else None
        version = self.hosted.get(kind, self.first_layers)
        return self.engine.submit(prompt, sampling, source=source, version=version), offered

    def finish(self, seen: Counter) -> None:
        """Note what was borrowed."""
        seen["engines that borrow"] += 1
        seen["borrowed steps"] += self.replica.lease.steps


def perform(made: InStages | OnLoan) -> Counter:
    """One schedule to its end: every token is held to the plain model of who said it. What happened is counted."""
    rng, engine, seen = made.rng, made.engine, made.engine.executor.seen
    waiting = sorted(rng.choice((rng.randint(0, 9), rng.randint(0, 30))) for _ in range(rng.randint(4, 7)))
    leaves = {rng.randint(1, 40): rng.randrange(7) for _ in range(rng.choice((0, 1, 1, 2)))}
    said: dict[Request, list[tuple[int, str]]] = {}
    offered: set[Request] = set()
    left: set[Request] = set()
    step = 0
    while waiting or engine.busy:
        made.advance(step)
        while waiting and (waiting[0] <= step or not engine.busy):
            waiting.pop(0)
            request, whether = made.submit(rng.choice(made.models.prompts))
            said[request] = []
            offered |= {request} if whether else set()
        if step in leaves and leaves[step] < len(said) and not (leaver := list(said)[leaves[step]]).finished:
            left.add(leaver)
            engine.cancel(leaver)
        for request, token in made.step():
            said[request].append((token, made.names.get(request.version, "whole")))
        engine.pool.check()
        step += 1
        assert step < 50_000
    for request, tokens in said.items():
        assert len(tokens) == TOKENS or request in left
        made.models.check(request.tokens[: request.prompt_tokens], tokens)
        names = {name for _, name in tokens}
        seen.update(names)
        seen["answer of several stages"] += len(names) > 1
        seen["foreign prefix"] += bool(tokens and request in offered and not request.fell_back)
    assert engine.pool.free == engine.pool.count
    if (host_pool := engine.executor.host_pool) is not None:
        host_pool.check()
    made.finish(seen)
    seen["cancelled"] += len(left)
    seen["finished"] += len(said) - len(left)
    seen.update(f"{recovery.action}, {recovery.reason}" for recovery in made.trace.recoveries)
    seen["shared tokens"] += engine.prefixes.hit_tokens if engine.prefixes is not None else 0
    return seen


@pytest.fixture(scope="module")
def models(lent, tmp_path_factory) -> Models:
    return Models(lent, tmp_path_factory.mktemp("everything"))


@pytest.fixture(scope="module")
def scheduled(models, neighbour) -> Callable[..., Counter]:
    """Performs the schedule of a number: every fifth borrows layers, the others' model comes in stages."""

    def run(seed: int, policy: Transition | None = None) -> Counter:
        rng = random.Random(seed)
        with closing(InStages(models, rng, policy) if seed % 5 else OnLoan(models, rng, neighbour)) as made:
            return perform(made)

    return run


def test_every_token_is_that_of_the_plain_model_of_its_variant(scheduled, neighbour):
    seen: Counter = Counter()
    for seed in range(SCHEDULES):
        own = scheduled(seed)
        seen += own
        preempted = own["swap, policy"] or own["recompute, policy"]
        ways = own["answer of several stages"] or own["borrowed steps"]
        variants = own["variants in one pass"] or (own["every layer"] and own["upper layers"])
        seen["all at once"] += bool(preempted and ways and variants and own["foreign prefix"] and own["cancelled"])
    nothing_is_left(neighbour.server)
    for what, least in OFTEN.items():
        assert seen[what] >= least, f"the schedules are too tame, {what}: {seen}"
    if kernels() is not None:
        assert seen["variants in one pass"] >= SCHEDULES // 2, seen


def test_a_variant_of_a_base_with_borrowed_layers_is_refused(models, neighbour):
    """The lenders have no adapter: a replica hosts variants once it has borrowed its last step."""
    adapter = models.adapter("every layer")
    with closing(OnLoan(models, random.Random(0), neighbour)) as made:
        executor = made.engine.executor
        for here in (0, 3):
            made.arrivals.come(here - made.replica.here)
            made.step()
            assert made.replica.here == here
            with pytest.raises(StageError, match="layers of the variant's base are borrowed; host it once all of them"):
                SharedBase(executor.version.decoder).variant(executor.model, adapter)
    nothing_is_left(neighbour.server)


def _one_block_changed(swap_out: Callable) -> Callable:
    def spoilt(executor: LiveExecutor, request: Request):
        moved = swap_out(executor, request)
        if moved is not None:
            executor.host_pool.rows(request.host)[0].neg_()
        return moved

    return spoilt


def _a_token_late(enter: Callable) -> Callable:
    return lambda kept, layer, hidden, chunks: enter(kept, layer, hidden.roll(1, 1), chunks)


def _of_each_other(join: Callable) -> Callable:
    return lambda accelerator, variants: join(accelerator, variants[::-1])


def _noticed(scheduled: Callable, **options: Any) -> None:
    with pytest.raises(AssertionError, match="wins by"):
        for seed in range(60):
            scheduled(seed, **options)


@pytest.mark.parametrize(
    ("of", "name", "spoil"),
    [
        (LiveExecutor, "swap_out", _one_block_changed),
        (HiddenStateCache, "enter", _a_token_late),
        (CPUAccelerator, "join", _of_each_other),
    ],
    ids=["a block in the host", "states that enter borrowed layers", "adapters in one pass"],
)
def test_a_part_that_is_wrong_is_noticed(scheduled, monkeypatch, of, name, spoil):
    """The controls, one a part."""
    if of is CPUAccelerator and kernels() is None:
        pytest.skip("no compiler builds the kernels here")
    monkeypatch.setattr(of, name, spoil(getattr(of, name)))
    _noticed(scheduled)


def test_the_adapter_of_another_variant_is_noticed(scheduled, models, monkeypatch):
    every, upper = (models.adapters[name] for name in VARIANTS)
    monkeypatch.setattr(models, "adapters", {"every layer": upper, "upper layers": every})
    _noticed(scheduled)


def test_the_cache_of_a_stranger_is_noticed(scheduled, models, monkeypatch):
    """It is a fine-tune's, whose keys and values the model itself does not have."""
    for name in ("whole", "twin"):
        monkeypatch.setitem(models.senders.identities, name, models.senders.identities["every layer"])
    _noticed(scheduled)


@pytest.mark.parametrize("kind", ["in stages", "upper layers"])
def test_too_small_a_group_is_noticed(scheduled, monkeypatch, kind):
    """It leaves layers to the sender that the receiver lacks, or has an adapter for."""
    monkeypatch.setitem(EXACT, kind, [("whole", Group(4, DEPTH))])
    _noticed(scheduled)


def test_a_stage_that_goes_on_with_what_an_earlier_one_cached_is_noticed(scheduled):
    _noticed(scheduled, policy=Naive())
