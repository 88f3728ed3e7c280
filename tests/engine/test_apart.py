"""An engine whose model is in another process: the same tokens, whatever becomes of that process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig
from waiting import until

from firsttoken.cps.policies import make_policy
from firsttoken.engine.async_engine import AsyncEngine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import LOST
from firsttoken.engine.request import Sampling
from firsttoken.engine.scheduler_state import VICTIMS
from firsttoken.study.errors import ModelError, ProfileError, RequestError, WorkerError
from firsttoken_extras.worker.remote_executor import RemoteExecutor
from firsttoken_extras.worker.worker_config import WorkerConfig

pytestmark = pytest.mark.long(seconds=40)
SHAPE = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    vocab_size=256,
    max_position_embeddings=512,
    pad_token_id=0,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
BLOCKS, ANSWER = 64, 24


@pytest.fixture(scope="module")
def subject(make_subject):
    return make_subject(SHAPE)


@pytest.fixture(scope="module")
def config(subject, tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = tmp_path_factory.mktemp("model")
    subject.model.save_pretrained(folder)
    return WorkerConfig(str(folder), BLOCKS, block_tokens=4, host_blocks=BLOCKS)


@pytest.fixture(scope="module")
def shared(config: WorkerConfig) -> Iterator[RemoteExecutor]:
    """One worker for all who do not hurt it."""
    with closing(RemoteExecutor(config)) as executor:
        yield executor


@pytest.fixture(scope="module")
def fragile(config: WorkerConfig) -> Iterator[RemoteExecutor]:
    """One whose workers are hurt."""
    with closing(RemoteExecutor(config)) as executor:
        yield executor


@pytest.fixture
def hurt(fragile: RemoteExecutor, config: WorkerConfig) -> Iterator[Callable[..., None]]:
    """The worker of ``fragile`` will not answer its next order: it is stopped, and ``killed`` once that is sent."""

    def hit(*, killed: bool = True) -> None:
        worker = fragile.worker
        os.kill(worker.pid, signal.SIGSTOP)
        send = worker.send

        def sent(data: bytes) -> None:
            send(data)
            os.kill(worker.pid, signal.SIGKILL)

        if killed:
            worker.send = sent
        else:
            fragile.config = replace(config, step_s=0.5)

    yield hit
    fragile.config = config


def gone(pid: int) -> bool:
    """Whether no such process is there, not even a dead one."""
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def perform(lab, executor, subject, seed: int, before_step=lambda run: None) -> Counter:
    """A random schedule by ``seed``; all answers are the known ones, whatever ``before_step`` does."""
    rng = random.Random(seed)
    known = [rng.choice(subject.known) for _ in range(rng.choice((1, 4, 6, 8)))]
    samplings = [Sampling(rng.randint(6, 16)) for _ in known]
    longest = max(len(one.prompt) + sampling.max_tokens for one, sampling in zip(known, samplings, strict=True))
    executor.blocks = min(BLOCKS, -(-longest // 4) + rng.choice((0, rng.randint(0, 8), 60)))
    run = lab.on(
        executor,
        policy=make_policy(rng.choice(("swap", "recompute", "online"))),
        scheduler=rng.choice(("sarathi", "sarathi", "prefill_first", "iteration_level")),
        token_budget=rng.choice((8, 16, 64)),
        requests=8,
        victim=rng.choice(sorted(VICTIMS)),
        share_prefixes=rng.random() < 0.5,
    )
    start = executor.now()
    for one, sampling in zip(known, samplings, strict=True):
        run.submit(one.prompt, sampling, start + rng.choice((0.0, rng.uniform(0, 0.01))))
    while run.engine.busy:
        before_step(run)
        run.step()
    run.all_back()
    said = [request.output for request in run.requests]
    assert said == [one.expected(sampling) for one, sampling in zip(known, samplings, strict=True)], seed
    seen = Counter(f"{recovery.action}: {recovery.reason}" for recovery in run.trace.recoveries)
    mixed = any(step.prefills and step.contexts for step in run.trace.steps)
    return seen + Counter(mixed=mixed, shared=run.engine.prefixes is not None and run.engine.prefixes.found_tokens > 0)


def test_every_schedule_gives_the_plain_tokens(lab, shared, subject) -> None:
    seen = Counter()
    for seed in range(60):
        seen += perform(lab, shared, subject, seed)
    assert all(seen[what] >= 3 for what in ("swap: policy", "recompute: policy", "mixed", "shared")), seen
    assert shared.lost == 0


def test_draws_and_chances_are_those_of_one_process(lab, shared, subject) -> None:
    """Also of who is preempted, and of prompts that are judged."""
    samplings = [
        Sampling(ANSWER, temperature=1.3, seed=5),
        Sampling(ANSWER, temperature=0.7, top_p=0.8, seed=6, logprobs=2),
        Sampling(ANSWER, logprobs=3, prompt_logprobs=True),
    ]
    shared.blocks = 17
    told = []
    with closing(LiveExecutor(subject.model, 17, block_tokens=4)) as live:
        for executor in (live, shared):
            run = lab.on(executor, scheduler="sarathi", token_budget=16, requests=8)
            for one, sampling in zip(subject.known[-3:], samplings, strict=True):
                run.submit(one.prompt, sampling, 0.0)
            said = run.finish()
            assert sum(request.preemptions for request in run.requests)
            token_logprobs = [
                token_logprob for one in run.requests for token_logprob in (*one.token_logprobs, *one.prompt_logprobs)
            ]
            told.append((said, [[token for token, _ in one.top_logprobs] for one in token_logprobs], token_logprobs))
    assert told[0][:2] == told[1][:2]
    ours, theirs = ([one.logprob for one in token_logprobs] for _, _, token_logprobs in told)
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "hangs"])
def test_a_lost_worker_is_replaced(lab, fragile, hurt, subject, killed: bool) -> None:
    """In the middle of prompts, answers and swaps: all requests end as if nothing had been, drawn ones too."""
    first, config, fragile.lost, fragile.blocks = fragile.worker.pid, fragile.config, 0, 24
    run = lab.on(fragile, scheduler="sarathi", token_budget=16, requests=8, preemption="swap", share_prefixes=True)
    drawn = Sampling(ANSWER, temperature=1.1, seed=3)
    for one in subject.known[-5:]:
        run.submit(one.prompt, Sampling(ANSWER), 0.0)
    run.submit(subject.known[-1].prompt, drawn, 0.0)
    run.until(lambda: run.engine.scheduler.swapped and run.requests[0].output)
    hurt(killed=killed)
    run.step()
    fragile.config = config
    assert fragile.lost == 1 and gone(first) and not run.engine.scheduler.swapped
    said = run.finish()
    assert said[:5] == [list(one.answer) for one in subject.known[-5:]]
    assert any(recovery.reason == LOST for recovery in run.trace.recoveries)
    with closing(LiveExecutor(subject.model, BLOCKS, block_tokens=4)) as live:
        alone = lab.on(live)
        alone.submit(subject.known[-1].prompt, drawn, 0.0)
        assert alone.finish() == [said[5]]


def test_lost_at_any_order(lab, fragile, hurt, subject) -> None:
    """Steps, swaps out and swaps in, by random schedules; nobody is begun more often than it may be."""
    fragile.lost, rng = 0, random.Random(7)

    def sometimes(run) -> None:
        if rng.random() < 0.1 and all(request.losses < 2 for request in run.requests):
            hurt()

    for seed in range(100, 112):
        perform(lab, fragile, subject, seed, sometimes)
    assert fragile.lost >= 8


def test_a_request_is_not_begun_for_ever(lab, fragile, hurt, subject) -> None:
    """The others go on: what has had nothing on the workers that were lost has lost nothing."""
    fragile.blocks = BLOCKS
    run = lab.on(fragile, scheduler="sarathi", token_budget=8, requests=8)
    for _ in range(1 + fragile.config.retries):
        run.submit(subject.known[-1].prompt, Sampling(ANSWER))
        hurt()
        run.step()
    first, *others = run.requests
    assert first.finished and first.output == [] and isinstance(first.failure, WorkerError)
    assert "begun 3 times" in str(first.failure) and "SIGKILL" in str(first.failure)
    run.finish()
    assert all(one.output == list(subject.known[-1].answer) and one.failure is None for one in others)


def test_clients_learn_it(lab, fragile, hurt, config, subject) -> None:
    """Where no other worker starts, as the model is gone; and one does once it is back."""
    fragile.blocks = BLOCKS
    run, folder = lab.on(fragile), Path(config.model)
    away = folder.rename(folder.with_name("away"))
    try:
        with AsyncEngine(run.engine) as server:
            hurt()
            with pytest.raises(WorkerError, match=r"begun 3 times.*no worker starts: "):
                list(server.submit(subject.known[-1].prompt, Sampling(ANSWER)))
            away.rename(folder)
            assert tuple(server.submit(subject.known[-1].prompt, Sampling(ANSWER))) == subject.known[-1].answer
        assert run.engine.pool.free == run.engine.pool.count
    finally:
        if away.exists():
            away.rename(folder)


def test_nothing_is_left(config) -> None:
    executor = RemoteExecutor(config)
    worker = executor.worker
    assert not worker.folder.exists(), "it goes once both ends are connected, so no kill leaves it"
    executor.close()
    executor.close()
    assert gone(worker.pid) and not worker.folder.exists()


def test_what_the_worker_refuses_is_told(config, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        RemoteExecutor(replace(config, model=str(tmp_path)))
    with pytest.raises(RequestError, match="host pool"):
        RemoteExecutor(replace(config, host_blocks=1 << 30))
    for changed in ({"swap": "by post"}, {"dtype": "int3"}, {"blocks": 0}, {"step_s": 0}, {"retries": -1}):
        with pytest.raises(ProfileError, match="worker: "):
            replace(config, **changed)


def test_an_engine_that_dies_takes_its_worker_along(config) -> None:
    """Also one that is stopped, so that nothing of its own can end it."""
    code = (
        "import os, sys, time; from firsttoken_extras.worker.worker_config import WorkerConfig;"
        "from firsttoken_extras.worker.remote_executor import RemoteExecutor;"
        f"executor = RemoteExecutor(WorkerConfig({config.model!r}, 8));"
        "print(executor.worker.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as engine:
        worker = int(engine.stdout.readline())
        os.kill(worker, signal.SIGSTOP)
        engine.kill()
    until(lambda: gone(worker), "the worker has gone")
