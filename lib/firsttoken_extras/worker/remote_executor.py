"""The engine's side of a worker: an executor that sends each step's work as bytes and takes its tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NoReturn

import zmq
from torch import Tensor

from firsttoken import old_names
from firsttoken.droidspeak.tensor_bytes import bytes_of
from firsttoken.engine.executor import DeviceLost, Limits
from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.engine.sampling import no_number
from firsttoken.engine.swap.block_copier import Moved, Movement
from firsttoken.engine.swap.host_pool import Span
from firsttoken.study import errors
from firsttoken.study.dtypes import name_of
from firsttoken.study.errors import CacheError, FirstTokenError, WorkerError
from firsttoken.study.system.sockets import remove_folder, socket_folder
from firsttoken_extras.worker.forkserver import WorkerForkserver, WorkerGone
from firsttoken_extras.worker.worker_config import WorkerConfig
from firsttoken_extras.worker.worker_messages import (
    MOST_BYTES,
    ChunkMessage,
    NewRequest,
    WorkerOrder,
    logprobs_of,
    pack,
    reply_of,
    sampling_told,
)

# What a worker knows of each request, so that a step tells it no more than what is new.


@dataclass
class _Known:
    tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class RequestDeltas:
    """Keeps what one worker has been told of each request, and what it is to forget with the next order."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._over: list[int] = []
        self._dropped: list[tuple[int, int]] = []

    def chunk(self, chunk: ScheduledChunk) -> ChunkMessage:
        """``chunk`` for the worker, which knows it then."""
        request, fresh = chunk.request, None
        known = self._known.get(request.number)
        if known is None:
            known = self._known[request.number] = _Known()
            judged, variant = len(request.prompt_logprobs), request.version.key if request.version else ""
            fresh = NewRequest(request.prompt_tokens, judged, sampling_told(request.sampling), variant)
        kept = len(known.blocks)
        if known.blocks != request.blocks[:kept]:
            kept = 0
        told, tokens, blocks = known.tokens, request.tokens[known.tokens :], request.blocks[kept:]
        known.tokens += len(tokens)
        known.blocks[kept:] = blocks
        return ChunkMessage(request.number, chunk.start, chunk.end, chunk.computed, told, tokens, kept, blocks, fresh)

    def has_blocks(self, request: Request) -> None:
        """It has been told of all blocks of ``request``."""
        self._known[request.number].blocks = list(request.blocks)

    def over(self, request: Request) -> None:
        """``request`` is over."""
        if self._known.pop(request.number, None) is not None:
            self._over.append(request.number)

    def dropped(self, host: Span) -> None:
        """Nobody needs ``host`` any more."""
        self._dropped.append((host.start, host.blocks))

    def forgotten(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Requests and spans that went since this was last asked."""
        gone = self._over, self._dropped
        self._over, self._dropped = [], []
        return gone


# A worker process and the only way to it: told and heard, noticed when it ends or says nothing, and ended.


class WorkerProcess:
    """A worker of ``forkserver`` behind a socket of an unguessable name, in a folder that only this user may enter. It
    goes once both ends are connected: whatever ends this process, it leaves no file.

    Raises WorkerGone for one that is not there after ``timeout_s``, and StorageError as :func:`socket_folder`.
    """

    def __init__(self, forkserver: WorkerForkserver, timeout_s: float) -> None:
        self._forkserver = forkserver
        self.folder = socket_folder()
        # the process's own context: one that is collected with its socket waits for that socket for ever
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        address = f"ipc://{self.folder}/{secrets.token_hex(8)}"
        self._socket.bind(address)
        try:
            self.pid = forkserver.spawn(address, timeout_s)
        except BaseException:
            self._give_back()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(forkserver.status_fd, zmq.POLLIN)
        try:
            self.receive(timeout_s)  # that it is there: what is sent before is lost
        except BaseException:
            self.close()
            raise
        remove_folder(self.folder)

    def send(self, data: bytes) -> None:
        """Never waits; a message to one that is gone is lost."""
        with suppress(zmq.Again):
            self._socket.send(data, zmq.DONTWAIT)

    def receive(self, timeout_s: float) -> bytes:
        """The next message. Raises WorkerGone when none will come, or has come for ``timeout_s``."""
        ready = dict(self._poller.poll(1000 * timeout_s))
        if self._socket in ready:
            return self._socket.recv()
        if not ready:
            raise WorkerGone(f"the worker has said nothing for {timeout_s:g} s")
        raise WorkerGone(f"the worker {self._forkserver.end()}")

    def close(self) -> None:
        """End it, whatever it is about, and wait until it and its socket are gone."""
        if self._forkserver.worker:
            self._forkserver.end()
        self._give_back()

    def _give_back(self) -> None:
        self._socket.close(linger=0)
        remove_folder(self.folder)


@dataclass(frozen=True)
class RemoteVariant:
    """Stands for the variant that the worker hosts under the name ``key``, as a ModelVersion does for one that is here;
    there are no stages."""

    key: str
    stage: int = 0


class RemoteExecutor:
    """Runs steps in a worker process, which hosts a LiveExecutor as ``config`` says.

    A worker that is lost is ended and another started at once; then DeviceLost is raised. Views and caches from
    elsewhere are of one process only. Raises WorkerError for a worker that does not start, and what it says of a model
    that it cannot host.
    """

    version = None
    salt = ""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.block_tokens = config.block_tokens
        self.blocks = config.blocks
        self.lost = 0  # workers so far
        self._serials = count(1)
        self._forkserver = WorkerForkserver()
        self.worker: WorkerProcess | None = None
        try:
            self._start()
        except WorkerGone as gone:
            self.close()
            raise WorkerError(f"{gone}; it was to host {config.model}") from gone
        except BaseException:
            self.close()
            raise

    @property
    def dtype(self) -> str:
        """Torch's name of what the worker computes in."""
        return self.config.dtype

    def now(self) -> float:
        """The machine's monotonic clock."""
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        """Sleep until ``moment_s``."""
        time.sleep(max(0.0, moment_s - self.now()))

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """The step, over there. Raises DeviceLost, and what the worker's own executor raises."""
        tokens, token_logprobs, failed = self._ask("step", lambda: [self._deltas.chunk(chunk) for chunk in chunks])
        vocabulary = self.limits.vocabulary
        if len(tokens) != len(chunks) or any(type(one) is not int or not 0 <= one < vocabulary for one in tokens):
            self._replace("the worker has answered nonsense")
        for row, said, judged in token_logprobs:
            chunks[row].request.token_logprobs += logprobs_of(said)
            chunks[row].request.prompt_logprobs += logprobs_of(judged)
        for row in failed:
            chunks[row].request.failure = no_number()
        return tokens

    def swap_out(self, request: Request) -> Moved | None:
        """Copy what the request has cached to the worker's host pool; None when that is full, or there is none."""
        if not self.config.host_blocks:
            return None
        found = self._ask("out", lambda: [request.number, request.cached, request.blocks])
        if found is None:
            return None
        self._deltas.has_blocks(request)
        request.host = Span(*found[:2])
        return Moved(*found[2:])

    def swap_in(self, request: Request) -> Movement:
        """Begin to copy it back."""
        host = request.host
        found = self._ask("in", lambda: [request.number, host.start, host.blocks, request.blocks])
        self._deltas.has_blocks(request)
        return _Returning(self, request.number, found and Moved(*found))

    def arrived(self, number: int, wait: bool) -> Moved | None:
        """What the way back of that request took; None while it is under way, which it is not after a ``wait``."""
        found = self._ask("arrived", lambda: [number, wait])
        return found and Moved(*found)

    def drop(self, host: Span) -> None:
        """Give the span back to the host pool, with the next order."""
        self._deltas.dropped(host)

    def forget(self, request: Request) -> None:
        """Drop what is kept of it, with the next order."""
        self._deltas.over(request)

    def fill(self, request: Request, layer: int, kv: Tensor) -> None:
        """Write them over there. Raises CacheError for those of another shape or dtype, WorkerError for more than a
        message holds, and DeviceLost."""
        content = [request.blocks, layer, list(kv.shape), name_of(kv.dtype), bytes(bytes_of(kv))]
        self._ask("fill", lambda: content)

    def hidden_states_of(self, hidden: object, tokens: int) -> NoReturn:
        """Raises CacheError: no layer of a worker's is computed again by itself."""
        raise CacheError("a worker process cannot take stored hidden states; serve without a worker")

    def close(self) -> None:
        """End the worker, and where it comes from."""
        self._end()
        self._forkserver.close()

    def _start(self) -> None:
        """Raises WorkerGone, and what the worker says of the model."""
        self._deltas = RequestDeltas()
        self.worker = WorkerProcess(self._forkserver, self.config.start_s)
        try:
            self.limits = Limits(*self._say("host", asdict(self.config), self.config.start_s))
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _ask(self, what: str, content: Any) -> Any:
        if self.worker is None and (fault := self._fault_of_start()):
            raise DeviceLost(fault, self.config.retries)
        try:
            # ``content`` is called only now: it holds what the worker does not know yet, and one that was just started
            # knows nothing.
            return self._say(what, content(), self.config.step_s)
        except WorkerGone as gone:
            self._replace(str(gone))

    def _say(self, what: str, content: Any, timeout_s: float) -> Any:
        """The worker's answer to an order. Raises WorkerGone, and the exception that it raised."""
        serial = next(self._serials)
        self.worker.send(pack(WorkerOrder(serial, what, *self._deltas.forgotten(), content)))
        try:
            reply = reply_of(self.worker.receive(timeout_s))
        except WorkerError as error:
            raise WorkerGone(f"the worker gave an answer that cannot be read: {error}") from error
        if reply.serial != serial:
            raise WorkerGone("the worker answered another order than it was given")
        if reply.fault:
            kind = getattr(errors, reply.fault, None)
            if isinstance(kind, type) and issubclass(kind, FirstTokenError):
                raise kind(reply.content)
            raise WorkerError(f"the worker met {reply.fault}: {reply.content}")
        return reply.content

    def _replace(self, why: str) -> NoReturn:
        """Raises DeviceLost, with another worker in the place of the one that is lost, if one starts."""
        self.lost += 1
        self._end()
        raise DeviceLost("; ".join(filter(None, (why, self._fault_of_start()))), self.config.retries)

    def _fault_of_start(self) -> str:
        """Why no worker starts; nothing where one does."""
        try:
            self._start()
        except (WorkerGone, FirstTokenError) as error:
            return f"no worker starts: {error}"
        return ""


class _Returning(Movement):
    """A way back in the worker; ``moved`` once it has ended."""

    def __init__(self, executor: RemoteExecutor, number: int, moved: Moved | None) -> None:
        self._executor, self._number, self._moved = executor, number, moved

    @property
    def done(self) -> bool:
        self._moved = self._moved or self._executor.arrived(self._number, wait=False)
        return self._moved is not None

    def wait(self) -> Moved:
        self._moved = self._moved or self._executor.arrived(self._number, wait=True)
        return self._moved


__getattr__ = old_names.classes(__name__, ApartExecutor="RemoteExecutor")
