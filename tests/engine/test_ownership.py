"""Work never outlives the ownership of what it writes, and nothing is read that a step which failed was to
write."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from owned import BrokenStep, Failing, Guard, Ordeal, Prefixes

from firsttoken.engine.async_engine import AsyncEngine
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import WorkerError
from firsttoken_extras.worker.remote_executor import RemoteExecutor
from firsttoken_extras.worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from conftest import Run

ANSWER = 24


@pytest.fixture(scope="module")
def prefixes(llama) -> Prefixes:
    return Prefixes(llama.model)


def test_bystanders_say_what_they_say_alone(lab, llama, prefixes) -> None:
    seen = Counter()
    for seed in range(24):
        seen += Ordeal(lab, llama, prefixes, seed).go()
    wanted = ("bystanders", "swap: policy", "recompute: policy", "shared", "cancelled: its prefix is awaited")
    assert all(seen[what] for what in (*wanted, "step failed: before", "step failed: within", "step failed: after"))


@pytest.mark.parametrize("fails", ["before", "within", "after"])
@pytest.mark.parametrize("others", [0, 1])
def test_who_shares_blocks_of_a_step_that_failed_computes_them(lab, llama, fails: str, others: int) -> None:
    """The client of whoever was to fill them goes before the next step."""
    one = llama.known[-1]
    run = lab.live(llama.model, 60, kind=Failing, share_prefixes=True, scheduler="sarathi", token_budget=64, requests=8)
    guard = Guard(run.engine)
    for _ in range(2 + others):
        run.submit(one.prompt, Sampling(ANSWER))
    run.engine.executor.fails = fails
    with pytest.raises(BrokenStep):
        run.step()
    run.audit()
    run.engine.cancel(run.requests[0])
    guard.check()
    assert run.finish()[1:] == [list(one.answer)] * (1 + others)
    guard.check()


@pytest.fixture(scope="module")
def apart(llama, tmp_path_factory) -> Iterator[RemoteExecutor]:
    """A worker whose copies from the host are made in a thread of its own, for requests that bear one loss each."""
    folder = tmp_path_factory.mktemp("model")
    llama.model.save_pretrained(folder)
    options = {"block_tokens": 4, "host_blocks": 64, "swap": "overlapped", "retries": 1}
    with closing(RemoteExecutor(WorkerConfig(str(folder), 24, **options))) as executor:
        yield executor


def dies(executor: RemoteExecutor) -> None:
    """The worker is killed once its next order is sent, before it reads that."""
    worker, send = executor.worker, executor.worker.send
    os.kill(worker.pid, signal.SIGSTOP)

    def sent(data: bytes) -> None:
        send(data)
        os.kill(worker.pid, signal.SIGKILL)

    worker.send = sent


@pytest.fixture
def pending(lab, apart: RemoteExecutor) -> Callable[[], Run]:
    """Makes engines in which requests come back from the host and whose worker is not asked whether they have, so that
    they are on their way until somebody waits for them."""
    apart.arrived = lambda number, wait: RemoteExecutor.arrived(apart, number, wait) if wait else None
    return lambda: lab.on(apart, preemption="swap", scheduler="sarathi", token_budget=16, requests=8)


def test_a_worker_that_is_lost_while_a_request_is_cancelled_is_lost_to_all(apart, pending, llama) -> None:
    for _ in range(40):  # the copy may have been there at once
        run, known = pending(), llama.known[8:12]
        for one in known:
            run.submit(one.prompt, Sampling(ANSWER))
        held = run.engine.scheduler
        while run.engine.busy and not (held.restoring and held.running):
            run.step()
        if run.engine.busy:
            break
    request, lost = held.restoring[0], apart.lost
    dies(apart)
    run.engine.cancel(request)
    assert apart.lost == lost + 1 and request.finished
    run.audit()
    run.finish()
    assert all(
        other is request or other.output == list(one.answer) for one, other in zip(known, run.requests, strict=True)
    )


def test_streams_end_that_a_loss_in_a_cancellation_has_ended(apart, pending, llama) -> None:
    """Those of requests that were begun too often: nobody waits for ever."""
    for _ in range(40):
        engine = pending().engine
        with AsyncEngine(engine) as server:
            held, step, gone = engine.scheduler, engine.step, []

            def goes(server=server, held=held, gone=gone) -> None:
                if held.restoring and held.running and not gone:
                    gone.append(held.restoring[0].number)
                    for request in held.running:
                        request.losses = apart.config.retries
                    dies(apart)
                    server._drop(server._streams[gone[0]])

            def watched(server=server, step=step, goes=goes) -> list:
                server.soon(goes)
                return step()

            engine.step = watched
            streams = [server.submit(one.prompt, Sampling(ANSWER)) for one in llama.known[8:12]]
            ends = []
            for stream, one in zip(streams, llama.known[8:12], strict=True):
                try:
                    ends.append(list(stream) == list(one.answer))
                except WorkerError as error:
                    ends.append("begun 2 times" in str(error) and "a failure")
        assert server.stats().blocks_used == 0
        if gone:
            break
    assert ends.pop(gone[0]) is False and all(ends) and "a failure" in ends
