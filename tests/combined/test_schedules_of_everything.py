"""Random schedules of everything that one engine does: a model in stages or on borrowed layers, fine-tunes of it beside
it, prefixes that others computed, preemption by cross-point, clients that leave. Tiny random weights, fp32.

Each token is the one that the plain model of its stage or variant has after all before it.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from borrowing import TIMEOUTS, nothing_is_left
from fine_tunes import tuned, written
from plain_tokens import Plain, check_greedy, judged
from senders import Senders
from swarms import DEPTH, Here
from torch import Tensor, nn
from transformers import PreTrainedModel

from firsttoken.cps.policies import make_policy
from firsttoken.droidspeak.prefill import Group
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.engine import live_executor
from firsttoken.engine.engine import Engine
from firsttoken.engine.engine_config import EngineConfig
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.native.library import kernels
from firsttoken.engine.preemptor import MOVED
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.step_plan import StepPlan
from firsttoken.engine.trace import Trace
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.loading.lora import parse_adapter
from firsttoken.progressiveserve.loading.views import make_view
from firsttoken.progressiveserve.passlayer import PassLayer, pass_layers
from firsttoken.progressiveserve.staged_serving.stage_versions import FusedBeside, StagedModelVersion, moving
from firsttoken.progressiveserve.staged_serving.transitions import (
    TRANSITIONS,
    FromBoundary,
    Naive,
    PrefillAgain,
    RequestBoundary,
    Transition,
)
from firsttoken.service.variants import ADAPTER_FILES, LateVariants, SharedBase
from firsttoken_extras.layer_borrowing.arrivals import LayerArrivals
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica

pytestmark = pytest.mark.long(seconds=40)

SCHEDULES = 400
TOKENS, BLOCK_TOKENS = 10, 4
STAGES = {"stage 1": (2, 3, 4), "stage 2": (3, 4), "whole": ()}  # what each lacks
BEGINNING = {"first layers": (2, 3, 4, 5)}  # what a replica lacks that has two layers, and passes the others
LATER = "every layer", "upper layers"  # the variants, by what their adapters are for
ANY = (Group(0, 0), Group(2, 4), Group(3, 6), Group(5, 6), Group(0, 3))
EXACT = {  # the caches that a request of each kind may take, as (sender, group), and have the plain model's tokens
    # a pruned stage has the whole model's keys and values below its first gap, and nowhere else
    "in stages": [("whole", Group(lo, DEPTH)) for lo in (0, 1, 2)],
    "whole": [("twin", group) for group in ANY],
    "every layer": [("every layer", group) for group in ANY],
    # a fine-tune has its base's up to the first layer that its adapter is for
    "upper layers": [("upper layers", group) for group in ANY] + [("whole", Group(lo, DEPTH)) for lo in (1, 2, 3)],
}


class Models:
    """``model`` for engines: its layers, its stages as views, and the folders of adapters for it; and what each stage
    and variant is as a ``plain`` model."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.folder = folder
        self.model, self.layers = copy.deepcopy(model), list(model.model.layers)
        self.layers = list(self.model.model.layers)
        ends = {"embed_tokens": self.model.model.embed_tokens, "norm": self.model.model.norm}
        ends["lm_head"] = self.model.lm_head
        self.plain: dict[str, PreTrainedModel] = {}
        self.views = {}
        for stage, (name, missing) in enumerate((STAGES | BEGINNING).items(), start=1):
            layers = [PassLayer() if number in missing else layer for number, layer in enumerate(self.layers)]
            self.views[name] = make_view(stage, layers, ends)
            self.plain[name] = copy.deepcopy(model)
            pass_layers(self.plain[name], missing)
        self.adapters = {}
        for seed, (name, layers) in enumerate(zip(LATER, (None, [3, 4, 5]), strict=True)):
            peft = tuned(model, seed, layers=layers)
            self.adapters[name] = written(peft, folder / name)
            self.plain[name] = peft.merge_and_unload()
        draw = random.Random(0)
        self.prompts = [[draw.randrange(256) for _ in range(length)] for length in range(17, 29)]
        senders = {name: self.plain[name] for name in ("whole", *LATER)} | {"twin": copy.deepcopy(model)}
        self.senders = Senders(model, senders, folder / "store", self.prompts)
        self.fused: FusedBeside = {}
        if kernels() is not None:
            list(self.version("whole", PrefillAgain()).fuse_beside(self.fused))
        self._logits: dict[tuple, Tensor] = {}

    def version(self, name: str, policy: Transition) -> StagedModelVersion:
        return StagedModelVersion(self.model, self.views[name], policy)

    def check(self, prompt: Sequence[int], said: Sequence[tuple[int, str]]) -> None:
        """Hold each token to the plain model of the name beside it."""
        tokens = [token for token, _ in said]
        for name in {name for _, name in said}:
            key = name, tuple(prompt), tuple(tokens)
            if key not in self._logits:
                self._logits[key] = judged(self.plain[name], prompt, tokens).logits
            places = [place for place, (_, by) in enumerate(said) if by == name]
            told = Plain([tokens[place] for place in places], self._logits[key][places])
            assert check_greedy(told.tokens, told) == len(places)


class Watched(LiveExecutor):
    """Counts in ``seen`` what else leaves no trace."""

    def __init__(self, seen: Counter, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen = seen

    def fill(self, request: Request, layer: int, kv: Tensor) -> None:
        super().fill(request, layer, kv)
        self.seen["layers of another's cache"] += 1

    def _said(self, version: ModelVersion, step: StepPlan) -> dict[int, int]:
        self.seen["variants in one pass"] += step.variants is not None
        return super()._said(version, step)


def _executor(models: Models, rng: random.Random, seen: Counter) -> Watched:
    blocks, host_blocks = rng.choice((10, 12, 16, 24)), rng.choice((0, 6, 100, 100))
    return Watched(seen, models.model, blocks, block_tokens=BLOCK_TOKENS, host_blocks=host_blocks)


def _config(rng: random.Random, shares: float) -> EngineConfig:
    return EngineConfig(
        scheduler=rng.choice(sorted(SCHEDULERS)),
        watermark=0.0,
        requests=8,
        token_budget=rng.randint(9, 40),
        prefill_tokens=rng.randint(9, 60),
        share_prefixes=rng.random() < shares,
    )


def _cross_point(rng: random.Random) -> Any:
    return make_policy("cross_point", threshold=rng.choice((22, 26, 30, 100)))


def _link(rng: random.Random) -> Link | None:
    return rng.choice((None, None, Link(), Link(fail_after_bytes=rng.randint(0, 20_000))))


class InStages:
    """A model whose stages arrive while it serves, with variants on the last one."""

    def __init__(self, models: Models, rng: random.Random, seen: Counter, policy: Transition | None = None) -> None:
        self.models, self.rng, self.trace = models, rng, Trace()
        self.policy = policy or rng.choice((PrefillAgain(), FromBoundary(), RequestBoundary()))
        executor = _executor(models, rng, seen)
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
            version.take_fused(self.models.fused)
        if stage == 0:
            self.engine.executor.version = version
            return
        assert self.engine.publish(version, moving(self.policy)) == []
        if version is self.stages[-1]:
            self.hosted = self.late.host(version, self.models.model)
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
        options = {"version": self.hosted[kind]} if kind in LATER else {"moves": rng.random() < 0.7}
        return self.engine.submit(prompt, Sampling(TOKENS), source=source, **options), source is not None

    def finish(self, seen: Counter) -> None:
        """Find nothing that is kept of requests that are over."""
        assert all(stage.hidden_cache is None or not stage.hidden_cache.nbytes for stage in self.stages)
        seen["engines in stages"] += 1


class OnLoan:
    """A replica whose layers come while a neighbour lends the others, with variants once all are there; some requests
    are content with the first layers and borrow none."""

    def __init__(self, models: Models, rng: random.Random, seen: Counter, neighbour: Here) -> None:
        self.models, self.rng, self.trace = models, rng, Trace()
        self.arrivals = LayerArrivals(DEPTH)
        lenders = [Lender(neighbour.server.record.address, range(DEPTH))]
        lease = Lease(lenders, neighbour.model, DEPTH, models.model.config.hidden_size, timeouts=TIMEOUTS)
        executor, config, policy = _executor(models, rng, seen), _config(rng, 0.0), _cross_point(rng)
        self.first_layers = models.version("first layers", RequestBoundary())
        self.replica = BorrowingReplica(
            executor, models.layers, self.arrivals, lease, config, policy=policy, trace=self.trace
        )
        self.names: dict[ModelVersion, str] = {self.first_layers: "first layers"}
        self.hosted: dict[str, ModelVersion] = {}
        self.engine, self.step, self.close = self.replica.engine, self.replica.step, self.replica.close
        self.arrivals.come(1 + rng.randint(0, 2))
        self.comes = sorted(rng.randint(0, 25) for _ in range(DEPTH - self.arrivals.layers))

    def advance(self, step: int) -> None:
        """Let come what comes before this step."""
        while self.comes and self.comes[0] <= step:
            self.comes.pop(0)
            self.arrivals.come()
        if self.replica.here == DEPTH and not self.hosted:
            executor = self.engine.executor
            executor.version = base = SharedBase(executor.version.decoder)
            for name, folder in self.models.adapters.items():
                files = [(folder / file).read_bytes() for file in ADAPTER_FILES]
                self.hosted[name] = base.variant(executor.model, parse_adapter(name, *files, "cpu"))
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


def perform(made: InStages | OnLoan, seen: Counter) -> None:
    """One schedule to its end; every token is held to the plain model of who said it."""
    models, rng, engine = made.models, made.rng, made.engine
    waiting = sorted(rng.choice((rng.randint(0, 9), rng.randint(0, 30))) for _ in range(rng.randint(4, 7)))
    leaves = {rng.randint(1, 40): rng.randrange(7) for _ in range(rng.choice((0, 0, 1, 2)))}
    held: list[Request] = []
    said: dict[Request, list[tuple[int, str]]] = {}
    offered, left = set(), set()
    step = 0
    while waiting or engine.busy:
        made.advance(step)
        while waiting and (waiting[0] <= step or not engine.busy):
            waiting.pop(0)
            request, whether = made.submit(rng.choice(models.prompts))
            held.append(request)
            said[request] = []
            offered |= {request} if whether else set()
        if (number := leaves.get(step, len(held))) < len(held) and not held[number].finished:
            left.add(held[number])
            engine.cancel(held[number])
        for request, token in made.step():
            said[request].append((token, made.names.get(request.version, "whole")))
        engine.pool.check()
        step += 1
        assert step < 50_000
    for request, tokens in said.items():
        assert len(tokens) == TOKENS or request in left
        models.check(request.tokens[: request.prompt_tokens], tokens)
        names = {name for _, name in tokens}
        seen.update(names)
        seen["answers of several stages"] += len(names) > 1
        seen["foreign prefixes"] += bool(tokens and request in offered and not request.fell_back)
        seen["fell back"] += bool(request.fell_back)
    assert engine.pool.free == engine.pool.count
    if (host_pool := engine.executor.host_pool) is not None:
        host_pool.check()
    made.finish(seen)
    seen["left"] += len(left)
    seen["finished"] += len(held) - len(left)
    seen.update(f"{recovery.action}, {recovery.reason}" for recovery in made.trace.recoveries)
    seen["shared tokens"] += engine.prefixes.found_tokens if engine.prefixes is not None else 0


@pytest.fixture(scope="module")
def models(lent, tmp_path_factory) -> Models:
    return Models(lent, tmp_path_factory.mktemp("everything"))


def test_every_mixture_says_what_the_plain_model_of_each_variant_says(models, neighbour):
    seen: Counter = Counter()
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        made = OnLoan(models, rng, seen, neighbour) if seed % 5 == 0 else InStages(models, rng, seen)
        with closing(made):
            perform(made, seen)
    nothing_is_left(neighbour.server)
    print(dict(seen))
