"""The coalesced swap, with the way back beside the computation of other requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from firsttoken.engine.kv import KVPool
from firsttoken.engine.swap.block_copier import Moved, Movement, OnStream, start
from firsttoken.engine.swap.coalesced import Coalesced
from firsttoken.engine.swap.host_pool import HostPool, Span


class Overlapped(Coalesced):
    """``into`` returns at once; until its transfer is done, nobody may use its blocks or give its span back.

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

    def out(self, blocks: Sequence[int], span: Span) -> Moved:
        # On a GPU both directions share one buffer, so a swap-out has to queue behind the swap-ins that are under way.
        with self._beside():
            return super().out(blocks, span)

    def into(self, span: Span, blocks: Sequence[int]) -> Movement:
        with self._beside():
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
    def _beside(self) -> Iterator[None]:
        """Queue the block's work on the side stream of a GPU, after what the current stream holds."""
        if self.pool.device.type == "cuda":
            self._side.wait_stream(torch.cuda.current_stream(self.pool.device))
            with torch.cuda.stream(self._side):
                yield
        else:
            yield


class OnThread(Movement):
    """A job that a worker thread does."""

    def __init__(self, future: Future[Moved]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Moved:
        return self._future.result()
