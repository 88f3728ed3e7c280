"""The engine in its thread: clients that come from anywhere, go away in mid-stream, or ask for what kills others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from firsttoken.engine.async_engine import AsyncEngine, Stream
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.swap.block_copier import CopyTimes, Movement
from firsttoken.study.errors import EngineError, RequestError

TIMEOUT_S = 120.0  # s; nothing here takes one of them
ANSWER = Sampling(24)


class Gated(LiveExecutor):
    """Steps when it is let, and counts the requests of each step; ``open`` lets it run on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.sizes: list[int] = []

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        self.sizes.append(len(chunks))
        self.begun.release()
        assert self.go.acquire(timeout=TIMEOUT_S)
        return super().execute(chunks)

    def open(self) -> None:
        self.go.release(10_000)


class Hall:
    """A server, and the engine under it; at the end it is held to having given everything back."""

    def __init__(self, lab) -> None:
        self._lab = lab

    def serve(self, model, blocks: int = 26, **options) -> AsyncEngine:
        self._run = self._lab.live(model, blocks, **({"host_blocks": 200, "preemption": "swap"} | options))
        self._server = AsyncEngine(self._run.engine)
        return self._server

    @property
    def executor(self) -> Any:
        return self._run.engine.executor

    @property
    def free(self) -> int:
        """Blocks of the pool that nobody has."""
        return self._run.engine.pool.free

    def during_a_step(self, *asked: Callable[[], Any]) -> list[Future]:
        """Ask the server for things in the middle of a step (of a gated executor), and let that step end."""
        assert self.executor.begun.acquire(timeout=TIMEOUT_S)
        answers = []
        for queued, what in enumerate(asked, start=1):
            answers.append(start(what))
            deadline = time.monotonic() + TIMEOUT_S
            while self._server._calls.qsize() < queued:
                assert time.monotonic() < deadline
        assert not any(answer.done() for answer in answers)
        self.executor.go.release()
        return answers

    def close(self) -> None:
        if isinstance(self.executor, Gated):
            self.executor.open()
        within(self._server.close)
        assert not self._run.engine.busy
        self._run.all_back()
        assert not [thread for thread in threading.enumerate() if thread.name == "firsttoken-engine"]


@pytest.fixture
def hall(lab) -> Iterator[Hall]:
    hall = Hall(lab)
    yield hall
    hall.close()


def start(what: Callable[[], Any]) -> Future:
    """Begin ``what`` in a thread that keeps nobody from going."""
    future: Future = Future()

    def chunk() -> None:
        try:
            future.set_result(what())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=chunk, daemon=True).start()
    return future


def within(what: Callable[[], Any]) -> Any:
    """What ``what`` returns or raises; fails instead of hanging."""
    return start(what).result(TIMEOUT_S)


def read(stream: Stream) -> list[int]:
    return within(lambda: list(stream))


def test_a_stream_gives_the_plain_tokens_as_they_come(hall, llama) -> None:
    one = llama.known[-1]
    server = hall.serve(llama.model)
    stream = server.submit(one.prompt, ANSWER)
    tokens = iter(stream)
    assert [within(lambda: next(tokens)) for _ in range(3)] == list(one.answer[:3])
    assert read(stream) == list(one.answer[3:])
    assert stream.request.finished and stream.request.output == list(one.answer)
    assert read(server.submit(one.prompt, Sampling(24, stop=(one.answer[4],)))) == one.expected(
        Sampling(24, stop=(one.answer[4],))
    )


def test_who_asks_again_after_the_end_is_told_again(hall, llama) -> None:
    server = hall.serve(llama.model)
    stream = server.submit(llama.known[0].prompt, Sampling(2))
    assert len(read(stream)) == 2
    assert read(stream) == [] and read(stream) == []
    stream.close()


def test_many_clients_in_threads(hall, llama) -> None:
    server = hall.serve(llama.model)

    def client(number: int) -> bool:
        known = [llama.known[(7 * number + n) % len(llama.known)] for n in range(3)]
        return all(list(server.submit(one.prompt, ANSWER)) == list(one.answer) for one in known)

    with ThreadPoolExecutor(8) as clients:
        assert all(clients.map(client, range(16), timeout=TIMEOUT_S))


def leave_by_close(stream: Stream) -> None:
    next(iter(stream))
    stream.close()
    stream.close()


def leave_the_block(stream: Stream) -> None:
    with pytest.raises(ZeroDivisionError), stream:
        for _ in stream:
            raise ZeroDivisionError


def forget_the_iterator(stream: Stream) -> None:
    tokens = iter(stream)
    next(tokens)
    del tokens


def never_read(stream: Stream) -> None:
    pass


@pytest.mark.parametrize("leave", [leave_by_close, leave_the_block, forget_the_iterator, never_read])
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_clients_that_go_away_disturb_nobody(hall, llama, policy: str, leave) -> None:
    """Nor do they keep their blocks: the hall checks when it closes, and the next request fills the whole pool."""
    server = hall.serve(llama.model, swap="overlapped", preemption=policy)
    known = llama.known[-6:]
    streams = [server.submit(one.prompt, ANSWER) for one in known]
    leaving = [start(lambda stream=stream: leave(stream)) for stream in streams[::2]]
    assert [read(stream) for stream in streams[1::2]] == [list(one.answer) for one in known[1::2]]
    for client in leaving:
        client.result(TIMEOUT_S)
    del streams
    assert len(read(server.submit([1] * 80, ANSWER))) == 24


def test_who_closes_gets_no_more_steps(hall, llama) -> None:
    """And who reads in another thread is told that it is over."""
    server = hall.serve(llama.model, kind=Gated)
    one = llama.known[-1]
    stream = server.submit(one.prompt, ANSWER)
    reading = start(lambda: list(stream))
    for _ in range(3):
        hall.during_a_step()
    (closing,) = hall.during_a_step(stream.close)
    closing.result(TIMEOUT_S)
    assert reading.result(TIMEOUT_S) == stream.request.output == list(one.answer[:4])
    assert hall.free == 26 and hall.executor.sizes == [1] * 4


def test_a_closed_server_says_so(hall, llama) -> None:
    server = hall.serve(llama.model, kind=Gated)
    streams = [server.submit(llama.known[4].prompt, ANSWER)]
    for coming in hall.during_a_step(*[lambda one=one: server.submit(one.prompt, ANSWER) for one in llama.known[5:8]]):
        streams.append(coming.result(TIMEOUT_S))
    for closing in hall.during_a_step(*[server.close] * 4):
        closing.result(TIMEOUT_S)
    for stream in streams * 2:  # who asks again is told again
        with pytest.raises(RequestError, match="the server was closed before the request was done"):
            read(stream)
        stream.close()
    with pytest.raises(RequestError, match="the server is closed; start another"):
        within(lambda: server.submit([1, 2]))
    server.close()
    assert hall.free == 26


def test_a_server_that_is_left_is_closed(hall, llama) -> None:
    with hall.serve(llama.model) as server:
        assert read(server.submit(llama.known[0].prompt, ANSWER)) == list(llama.known[0].answer)
    with pytest.raises(RequestError, match="the server is closed; start another"):
        within(lambda: server.submit([1, 2]))


def test_a_submission_waits_for_one_step_at_most(hall, llama) -> None:
    """Five clients come during a step; all of them are in before the next one begins."""
    server = hall.serve(llama.model, 200, kind=Gated)
    first = server.submit(llama.known[-1].prompt, Sampling(20))
    known = llama.known[-6:-1]
    coming = hall.during_a_step(*[lambda one=one: server.submit(one.prompt, Sampling(20)) for one in known])
    streams = [client.result(TIMEOUT_S) for client in coming]
    hall.during_a_step()
    assert hall.executor.sizes[:2] == [1, 5]
    hall.executor.open()
    assert [read(stream) for stream in streams] == [list(one.answer[:20]) for one in known]
    assert read(first) == list(llama.known[-1].answer[:20])


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], ANSWER, RequestError),
        ([1] * 90, ANSWER, RequestError),
        (["a"], ANSWER, RequestError),
        (None, ANSWER, RequestError),
        ([999], ANSWER, RequestError),
        ([1], "hot", AttributeError),  # a mistake of the caller's program: it comes back to the caller alone
    ],
)
def test_what_one_asks_wrongly_hurts_nobody_else(hall, llama, prompt, sampling, error: type[Exception]) -> None:
    server = hall.serve(llama.model)
    stream = server.submit(llama.known[-1].prompt, ANSWER)
    with pytest.raises(error):
        within(lambda: server.submit(prompt, sampling))
    assert read(stream) == list(llama.known[-1].answer)
    assert read(server.submit(llama.known[2].prompt, ANSWER)) == list(llama.known[2].answer)


class FailsOnce(Gated):
    """Out of memory in its tenth step, after it has written all of it."""

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        tokens = super().execute(chunks)
        if len(self.sizes) == 10:
            raise RuntimeError("out of memory")
        return tokens


class LinkFailsOnce(Gated):
    """The first way back breaks off."""

    broken = False

    def swap_in(self, request: Request) -> Movement:
        transfer = super().swap_in(request)
        if self.broken:
            return transfer
        self.broken = True
        return Broken()


class Broken(Movement):
    done = True

    def wait(self) -> CopyTimes:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("kind", [FailsOnce, LinkFailsOnce])
def test_when_a_step_fails_those_who_are_open_learn_it_and_the_next_may_run(hall, llama, kind: type[Gated]) -> None:
    """Five at once; the first of them may have ended before the link is needed."""
    server = hall.serve(llama.model, kind=kind)
    known = llama.known[-5:]
    streams = [server.submit(known[0].prompt, ANSWER)]
    for coming in hall.during_a_step(*[lambda one=one: server.submit(one.prompt, ANSWER) for one in known[1:]]):
        streams.append(coming.result(TIMEOUT_S))
    hall.executor.open()
    failed = 0
    for stream, one in zip(streams, known, strict=True):
        said: list[int] = []
        try:
            within(lambda stream=stream, said=said: said.extend(stream))
            assert said == list(one.answer)
        except EngineError as error:
            assert str(error).startswith("the engine failed: out of memory; ask again")
            assert stream.request.output == list(one.answer[: len(stream.request.output)])
            failed += 1
        assert stream.request.finished
    assert failed == 5 if kind is FailsOnce else failed >= 3
    assert hall.free == 26
    assert [read(server.submit(one.prompt, ANSWER)) for one in known] == [list(one.answer) for one in known]
