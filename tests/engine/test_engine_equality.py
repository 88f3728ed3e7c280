"""However requests share the pool, each says what it says alone: the greedy tokens of plain ``generate``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from chunked import Chunked
from plain_tokens import generated

from firsttoken.crosspoint.policies import make_policy
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.swap import PATHS
from firsttoken.engine.swap.path import Moved
from firsttoken.engine.victims import VICTIMS

pytestmark = pytest.mark.long(seconds=100)
ANSWER = 24
LONGEST = 16  # tokens of an answer in a schedule: what shows then shows in eight more as well, for half as much again


@dataclass(frozen=True)
class Asked:
    """A known prompt by number, how far its answer may go (``stop``: the place of a token that ends it), and when."""

    number: int
    max_tokens: int
    stop: int | None
    after_ms: float


@dataclass(frozen=True)
class Schedule:
    """A way to share the pool: ``spare`` blocks beyond what the longest request needs."""

    asked: list[Asked]
    block_tokens: int
    spare: int
    host_blocks: int
    swap: str
    policy: tuple[str, float | None]
    config: EngineConfig


@pytest.fixture(autouse=True, scope="module")
def in_pieces() -> Iterable[None]:
    """A scheduler more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULERS, Chunked.name, Chunked)
        yield


def draw_schedule(seed: int, numbers: int, arrivals: bool) -> Schedule:
    """By ``seed`` alone, so that a run has what the one before it had."""
    rng = random.Random(seed)
    asked = [
        Asked(
            number=rng.randrange(numbers),
            max_tokens=rng.randint(*rng.choice(((1, 4), (6, LONGEST), (12, LONGEST)))),
            stop=rng.randrange(LONGEST) if rng.random() < 0.2 else None,
            after_ms=rng.uniform(0, 8) if arrivals else 0.0,
        )
        for _ in range(rng.choice((1, 2, 4, 5, 6, 7, 8, 8)))
    ]
    name = rng.choice(("swap", "recompute", "cross_point", "online"))
    config = EngineConfig(
        scheduler=rng.choice((*SCHEDULERS, "iteration_level", *["prefill_first"] * 4)),
        victim=rng.choice(sorted(VICTIMS)),
        watermark=rng.choice((0.0, 0.0, rng.uniform(0, 0.5))),
        requests=rng.choice((256, 256, rng.randint(1, 8))),
        prefill_tokens=rng.choice((2048, 2048, rng.randint(1, 100))),
        overtake=rng.random() < 0.3,
        share_prefixes=rng.random() < 0.4,
    )
    return Schedule(
        asked=asked,
        block_tokens=rng.choice((rng.randint(1, 5), rng.randint(1, 16))),
        spare=rng.choice((0, rng.randint(0, 8), rng.randint(0, 8), rng.randint(0, 60))),
        host_blocks=rng.choice((0, 0, rng.randint(1, 10), 500, 500)),
        swap=rng.choice(sorted(PATHS)),
        policy=(name, rng.uniform(0, 50) if name == "cross_point" else None),
        config=config,
    )


def perform(lab, subject, schedule: Schedule) -> Counter:
    """Run ``schedule``, hold every answer to the known one, and count what happened on the way."""
    known = [subject.known[asked.number] for asked in schedule.asked]
    samplings = [
        Sampling(asked.max_tokens, stop=() if asked.stop is None else (one.answer[asked.stop],))
        for asked, one in zip(schedule.asked, known, strict=True)
    ]
    sizes = [(len(one.prompt), sampling.max_tokens) for one, sampling in zip(known, samplings, strict=True)]
    name, threshold = schedule.policy
    run = lab.live(
        subject.model,
        lab.smallest_pool(sizes, schedule.block_tokens, schedule.config.watermark) + schedule.spare,
        block_tokens=schedule.block_tokens,
        host_blocks=schedule.host_blocks,
        swap=schedule.swap,
        policy=make_policy(name) if threshold is None else make_policy(name, threshold=threshold),
        **vars(schedule.config),
    )
    start = run.engine.executor.now()
    for asked, one, sampling in zip(schedule.asked, known, samplings, strict=True):
        run.submit(one.prompt, sampling, start + asked.after_ms / 1e3)
    outputs = run.finish()
    assert outputs == [one.expected(sampling) for one, sampling in zip(known, samplings, strict=True)], schedule
    assert sum(request.preemptions for request in run.requests) == len(run.trace.recoveries)
    seen = Counter(f"{recovery.action}: {recovery.reason}" for recovery in run.trace.recoveries)
    shared = run.engine.prefixes is not None and run.engine.prefixes.found_tokens > 0
    return seen + Counter(mixed=any(step.prefills and step.contexts for step in run.trace.steps), shared=shared)


@pytest.mark.parametrize(
    ("kind", "arrivals", "examples"),
    [("fused", False, 240), ("fused", True, 160), ("llama", False, 120), ("llama", True, 80)],
)
def test_every_schedule_gives_the_plain_tokens(
    lab, kind: str, arrivals: bool, examples: int, request: pytest.FixtureRequest
) -> None:
    """With the kernels between fused layers, and with stock modules and attention."""
    subject, seen = request.getfixturevalue(kind), Counter()
    for seed in range(examples):
        seen.update(perform(lab, subject, draw_schedule(seed, len(subject.known), arrivals)))
    for what in ("swap: policy", "recompute: policy", "recompute: host pool full", "mixed", "shared"):
        assert seen[what] >= examples // 50, f"the schedules are too tame: {seen}"


@pytest.mark.parametrize("kind", ["qwen2", "lora"])
def test_models_with_biases_or_an_adapter_too(lab, kind: str, request: pytest.FixtureRequest) -> None:
    subject, seen = request.getfixturevalue(kind), Counter()
    for seed in range(40):
        seen.update(perform(lab, subject, draw_schedule(seed, len(subject.known), arrivals=False)))
    assert seen["swap: policy"] and seen["recompute: policy"]


class Forgetful(LiveExecutor):
    """Loses what waits on the host, all of it or the last ``lost`` blocks."""

    lost = 0

    def swap_out(self, request: Request) -> Moved | None:
        moved = super().swap_out(request)
        if moved is not None:
            self.arena.rows(request.host)[-self.lost :] = 0
        return moved


class LosesOneBlock(Forgetful):
    lost = 1


def under_pressure(lab, subject, **options):
    """Six long requests in a pool for little more than one; which of them were swapped, and which came out wrong."""
    run = lab.live(subject.model, 20, host_blocks=200, preemption="swap", **options)
    known = subject.known[-6:]
    for one in known:
        run.submit(one.prompt, Sampling(ANSWER), 0.0)
    outputs = run.finish()
    swapped = {recovery.request for recovery in run.trace.recoveries}
    return swapped, {i for i, (one, said) in enumerate(zip(known, outputs, strict=True)) if said != list(one.answer)}


def test_these_models_notice_a_spoilt_copy(lab, llama) -> None:
    """The control of all the tests above: equal tokens mean something only if a wrong cache changes them."""
    swapped, wrong = under_pressure(lab, llama)
    assert len(swapped) >= 3 and not wrong
    swapped, wrong = under_pressure(lab, llama, kind=Forgetful)
    assert len(swapped) >= 3 and wrong == swapped
    swapped, wrong = under_pressure(lab, llama, kind=LosesOneBlock)
    assert wrong and wrong <= swapped


def test_other_decoders_too(lab, family) -> None:
    swapped, wrong = under_pressure(lab, family)
    assert swapped and not wrong
    swapped, wrong = under_pressure(lab, family, kind=Forgetful)
    assert wrong == swapped


def test_the_model_is_left_as_it_was(lab, llama) -> None:
    under_pressure(lab, llama)
    lab.close()
    assert llama.model.config._attn_implementation == "sdpa"
    one = llama.known[-1]
    for stop in (None, one.answer[7]):  # and `Known.expected` cuts where `generate` does
        said = generated(llama.model, one.prompt, ANSWER, eos_token_id=stop)
        assert said.tokens == one.expected(Sampling(ANSWER, stop=() if stop is None else (stop,)))
