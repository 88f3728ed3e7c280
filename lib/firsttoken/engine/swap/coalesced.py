"""The whole request at once: its rows are gathered, and cross the link in one copy, also beside the coming steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from firsttoken.engine.kv import KVPool
from firsttoken.engine.swap.block_copier import CopyTimes, Move, Movement, OnStream, SwapPath, start
from firsttoken.engine.swap.host_pool import HostPool, Span

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Coalesced(SwapPath):
    """One copy a request, whatever its length."""

    name = "coalesced"

    def __init__(self, pool: KVPool, host_pool: HostPool) -> None:
        super().__init__(pool, host_pool)
        rows = HostRows if pool.device.type == "cpu" else StagedRows
        self._rows = rows(pool.rows, host_pool.all_rows)

    def _plan_out(self, blocks: Sequence[int], span: Span) -> tuple[int, Move]:
        return 1, self._rows.gather(blocks, span)

    def _plan_into(self, blocks: Sequence[int], span: Span) -> tuple[int, Move]:
        return 1, self._rows.scatter(span, blocks)


class HostRows:
    """``pool`` [blocks, ...] in host memory, moved straight to and from spans of ``host`` [blocks, ...].

    With numpy, whose ``take`` and assignment by index are one memcpy a row, without the GIL: 0.85 to 1.0 of the rate of
    one contiguous copy. ``index_select`` and a ``copy_`` of each row came as near with one thread, but fell to 0.2 with
    two on a busy machine, where the threads wait for each other; ``index_copy_`` reached 0.3 to 0.8 with either.
    """

    def __init__(self, pool: torch.Tensor, host: torch.Tensor) -> None:
        self._pool, self._host = _words(pool).numpy(), _words(host).numpy()

    def gather(self, blocks: Sequence[int], span: Span) -> Move:
        """The movement of ``blocks`` of the pool to ``span``."""
        index, target = np.asarray(blocks), self._host[span.start : span.end]

        def move() -> None:
            np.take(self._pool, index, axis=0, out=target, mode="clip")  # "raise" would go through a temporary

        return move

    def scatter(self, span: Span, blocks: Sequence[int]) -> Move:
        """The movement of ``span`` to ``blocks`` of the pool."""
        index, source = np.asarray(blocks), self._host[span.start : span.end]

        def move() -> None:
            self._pool[index] = source

        return move


class StagedRows:
    """``pool`` [blocks, ...] on a device, moved to and from spans of ``host`` [blocks, ...] by way of a buffer beside
    the pool, in which a request's rows lie together.

    The buffer is kept, and grows to the longest request so far: that much device memory the pool cannot have. One
    movement at a time may use it: all have to be queued on one stream.
    """

    def __init__(self, pool: torch.Tensor, host: torch.Tensor) -> None:
        self._pool, self._host = _words(pool), _words(host)
        self._buffer = self._pool[:0]

    def gather(self, blocks: Sequence[int], span: Span) -> Move:
        """The movement of ``blocks`` of the pool to ``span``."""
        index, staged, host = self._index(blocks), self._staged(len(blocks)), self._host[span.start : span.end]

        def move() -> None:
            torch.index_select(self._pool, 0, index, out=staged)
            host.copy_(staged, non_blocking=True)

        return move

    def scatter(self, span: Span, blocks: Sequence[int]) -> Move:
        """The movement of ``span`` to ``blocks`` of the pool."""
        index, staged, host = self._index(blocks), self._staged(len(blocks)), self._host[span.start : span.end]

        def move() -> None:
            staged.copy_(host, non_blocking=True)
            self._pool.index_copy_(0, index, staged)

        return move

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        # pageable and yet not waited for: CUDA takes so small a copy into a buffer of its own before it returns
        return torch.tensor(blocks).to(self._pool.device, non_blocking=True)

    def _staged(self, count: int) -> torch.Tensor:
        """The first ``count`` rows of the buffer."""
        if len(self._buffer) < count:
            self._buffer = self._pool.new_empty(count, self._pool.shape[1])
        return self._buffer[:count]


def _words(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` [n, ...], contiguous, as integers [n, words] in the same memory, the widest that a row is made of.

    No dtype of a cache is then one that numpy, or a kernel, does not know; and a kernel moves 8 bytes at a time.
    """
    flat = rows.flatten(1)
    row_bytes = flat.shape[1] * flat.itemsize
    return flat.view(next(word for word in _WORDS if row_bytes % word.itemsize == 0))


# The same while others are computed.


class Overlapped(Coalesced):
    """The coalesced swap, with the way back beside the computation of other requests.

    ``into`` returns at once; until its transfer is done, nobody may use its blocks or give its span back.

    On a GPU all movements are queued on one side stream, after what the current stream holds when they are asked for:
    its kernels may still read the blocks. On a CPU one worker thread does the transfers, in turn. ``out`` stays
    synchronous, as its blocks are wanted at once.
    """

    name = "overlapped"

    def __init__(self, pool: KVPool, host_pool: HostPool) -> None:
        super().__init__(pool, host_pool)
        if pool.device.type == "cuda":
            self._side = torch.cuda.Stream(pool.device)
        else:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="swap-in")

    def out(self, blocks: Sequence[int], span: Span) -> CopyTimes:
        # On a GPU both directions share one buffer, so a swap-out has to queue behind the swap-ins that are under way.
        with self._on_side_stream():
            return super().out(blocks, span)

    def into(self, span: Span, blocks: Sequence[int]) -> Movement:
        with self._on_side_stream():
            job = self._job(self._plan_into, blocks, span)
            if self.pool.device.type == "cuda":
                return OnStream(job, self.pool.device)
            return OnThread(self._worker.submit(lambda: start(job, self.pool.device).wait()))

    def close(self) -> None:
        super().close()
        if self.pool.device.type == "cuda":
            self._side.synchronize()
        else:
            self._worker.shutdown()

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Queue the block's work on the side stream of a GPU, after what the current stream holds."""
        if self.pool.device.type == "cuda":
            self._side.wait_stream(torch.cuda.current_stream(self.pool.device))
            with torch.cuda.stream(self._side):
                yield
        else:
            yield


class OnThread(Movement):
    """A job that a worker thread does."""

    def __init__(self, future: Future[CopyTimes]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> CopyTimes:
        return self._future.result()
