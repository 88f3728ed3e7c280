"""The worker process: a LiveExecutor that does what an engine elsewhere orders, until that engine is gone."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any

import torch
import zmq

from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.swap.block_copier import Movement
from firsttoken.engine.swap.host_pool import Span
from firsttoken.study.dtypes import named
from firsttoken.study.parsing.schema import shaped
from firsttoken_extras.worker.forkserver import FORKS
from firsttoken_extras.worker.worker_config import WorkerConfig
from firsttoken_extras.worker.worker_messages import (
    MOST_BYTES,
    ChunkMessage,
    WorkerOrder,
    WorkerReply,
    blocks_of,
    order_of,
    pack,
    sampling_of,
    works_of,
)
from firsttoken_extras.worker.worker_model import StageHost, load_worker_model, load_worker_variants


class WorkerExecutor:
    """``executor`` by orders; ``versions`` are variants of its model by name. Of each request it keeps what it was told
    of it."""

    def __init__(
        self,
        executor: LiveExecutor,
        versions: Mapping[str, ModelVersion] = MappingProxyType({}),
        stages: StageHost | None = None,
    ) -> None:
        self.executor, self._stages = executor, stages
        self._versions = {"": None, **versions} if stages is None else stages.versions
        self._known: dict[int, Request] = {}
        self._moving: dict[int, Movement] = {}
        self._orders: dict[str, Callable[..., Any]] = {
            "out": self._out,
            "in": self._in,
            "arrived": self._arrived,
            "fill": self._fill,
            "stages": self._progress,
        }

    def handle(self, order: WorkerOrder) -> Any:
        """The content of the answer. Raises what goes wrong."""
        for number in order.over:
            if (request := self._known.pop(number, None)) is not None:  # a step that failed may not have told of it
                self.executor.forget(request)
        for start, blocks in order.dropped:
            self.executor.drop(Span(start, blocks))
        if order.what == "step":
            with nullcontext() if self._stages is None else self._stages.turn:
                return self._step(works_of(order.content, self.executor.blocks))
        return self._orders[order.what](*order.content)

    def _step(self, told: Sequence[ChunkMessage]) -> tuple[list[int], list[Any], list[int]]:
        """Tokens, the chances of the rows that asked for them, and the rows whose logits are no finite numbers."""
        chunks = [self._work(one) for one in told]
        judged = [len(chunk.request.prompt_logprobs) for chunk in chunks]
        tokens, token_logprobs = self.executor.execute(chunks), []
        for row, (chunk, before) in enumerate(zip(chunks, judged, strict=True)):
            said, read = chunk.request.token_logprobs, chunk.request.prompt_logprobs[before:]
            if said or read:
                token_logprobs.append((row, said, read))
                chunk.request.token_logprobs = []
        return tokens, token_logprobs, [row for row, chunk in enumerate(chunks) if chunk.request.failure is not None]

    def _work(self, told: ChunkMessage) -> ScheduledChunk:
        if told.fresh is not None:
            request = Request(told.number, told.tokens, sampling_of(told.fresh.sampling), 0.0)
            request.prompt_tokens = told.fresh.prompt_tokens
            request.prompt_logprobs = [None] * told.fresh.judged  # the engine has them
            request.version = self._versions[told.fresh.variant]
            self._known[told.number] = request
        else:
            request = self._known[told.number]
            request.tokens[told.told :] = told.tokens
        request.blocks[told.kept :] = told.blocks
        return ScheduledChunk(request, told.start, told.end, told.computed)

    def _out(self, number: int, cached: int, blocks: list[int]) -> tuple[Any, ...] | None:
        request = self._known[number]
        request.cached, request.blocks = cached, blocks
        moved = self.executor.swap_out(request)
        return None if moved is None else (request.host.start, request.host.blocks, *vars(moved).values())

    def _in(self, number: int, start: int, count: int, blocks: list[int]) -> tuple[Any, ...] | None:
        request = self._known[number]
        request.host, request.blocks = Span(start, count), blocks
        self._moving[number] = self.executor.swap_in(request)
        return self._arrived(number, False)

    def _fill(self, blocks: list[int], layer: int, shape: list[int], dtype: str, content: bytes) -> None:
        request = Request(0, [0], Sampling(1), 0.0)  # which has these blocks, and is not known here yet
        request.blocks = blocks_of(blocks, self.executor.blocks)
        kv = torch.frombuffer(bytearray(content), dtype=named(dtype)).view(shape)
        self.executor.fill(request, layer, kv)

    def _progress(self, serving: int) -> dict[str, Any]:
        """What has come, for an engine whose new requests begin with stage ``serving``."""
        self._stages.forget_all_but(serving, {request.version for request in self._known.values()})
        return self._stages.status()

    def _arrived(self, number: int, wait: bool) -> tuple[Any, ...] | None:
        if not (wait or self._moving[number].done):
            return None
        return tuple(vars(self._moving.pop(number).wait()).values())


def serve(address: str) -> None:
    """Obey what comes over the socket at ``address``; the first order says what to host."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.connect(address)
    # The engine waits for this message: whatever it sent before the worker had connected would be lost.
    socket.send(b"")
    hosted: WorkerExecutor | None = None
    while True:
        order = order_of(socket.recv())
        try:
            if hosted is None:
                hosted = _hosted(shaped(WorkerConfig, order.content))
                limits = hosted.executor.limits
                data = pack(WorkerReply(order.serial, "", (limits.context, limits.vocabulary)))
            else:
                data = pack(WorkerReply(order.serial, "", hosted.handle(order)))
        except Exception as error:  # the engine decides what it means
            data = pack(WorkerReply(order.serial, type(error).__name__, str(error)))
        socket.send(data)


def _hosted(config: WorkerConfig) -> WorkerExecutor:
    torch.set_num_threads(config.threads)
    if config.first_stage:
        stages = StageHost(config)
        return WorkerExecutor(stages.hosted(), stages=stages)
    executor = LiveExecutor(
        load_worker_model(config),
        config.blocks,
        block_tokens=config.block_tokens,
        host_blocks=config.host_blocks,
        swap=config.swap,
    )
    return WorkerExecutor(executor, load_worker_variants(config, executor))


def serve_forks() -> None:
    """A worker for each address that comes as a line, one after another, until the engine is gone: its process id is
    told, and, once it has ended, its status."""
    while address := sys.stdin.buffer.readline().decode().strip():
        watched, held = os.pipe()  # the copy holds this end, so it ends as that does
        worker = os.fork() if FORKS else 0
        if not worker:
            if not FORKS:
                _say(os.getpid())
            _live(address)
        os.close(held)
        os.setpgid(worker, worker)  # what it starts can be ended with it
        _say(worker)
        ending = select.poll()
        ending.register(watched, select.POLLIN)
        ending.register(sys.stdin, 0)
        if any(handle != watched for handle, _ in ending.poll()):
            os.killpg(worker, signal.SIGKILL)
        _say(os.waitpid(worker, 0)[1])
        os.close(watched)


def _live(address: str) -> None:
    os.dup2(2, 1)  # what is printed is no process id
    threading.Thread(target=_end_with_the_engine, name="engine", daemon=True).start()
    try:
        serve(address)
    finally:
        os._exit(1)


def _end_with_the_engine() -> None:
    """Its end of standard input is closed by itself, or by the system when it dies."""
    ending = select.poll()
    ending.register(sys.stdin, 0)
    ending.poll()
    os._exit(0)


def _say(number: int) -> None:
    with suppress(BrokenPipeError):
        os.write(1, f"{number}\n".encode())


if __name__ == "__main__":
    serve_forks()
