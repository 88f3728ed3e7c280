"""A swap path: how the KV blocks of one request get to host memory and back, and how long that takes.

Times are split as CPS splits them (3.2.1): "prep" is the work on the host before anything moves, making a list of
copies or an index; "copy" is the movement, between two CUDA events on a GPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from firsttoken.engine.kv import KVPool
from firsttoken.engine.swap.host_pool import HostPool, Span
from firsttoken.study.errors import RequestError

Move = Callable[[], None]  # makes the copies of one movement on a CPU, or queues them on the current stream of a GPU


@dataclass(frozen=True)
class CopyTimes:
    """The seconds that one movement took, and its ``copies`` over the link, of ``bytes`` in all."""

    prep_s: float
    copy_s: float
    copies: int
    bytes: int


@dataclass(frozen=True)
class CopyJob:
    """A movement that is ready to start."""

    move: Move
    copies: int
    bytes: int
    prep_s: float = 0.0

    def moved(self, copy_s: float) -> CopyTimes:
        return CopyTimes(self.prep_s, copy_s, self.copies, self.bytes)


class Movement(ABC):
    """A movement that was started. Its blocks and its span belong to it until it is done."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Return whether ``wait`` would return at once."""

    @abstractmethod
    def wait(self) -> CopyTimes:
        """Wait for the end, and return what the movement took. Raises what went wrong on the way."""


@dataclass(frozen=True)
class Finished(Movement):
    """A movement that ended before ``start`` returned."""

    moved: CopyTimes
    done: ClassVar[bool] = True

    def wait(self) -> CopyTimes:
        return self.moved


class OnStream(Movement):
    """A job queued on the current CUDA stream of ``device``, timed by an event on each side of it."""

    def __init__(self, job: CopyJob, device: torch.device) -> None:
        self._job = job
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        self._start.record(stream)
        job.move()
        self._end.record(stream)

    @property
    def done(self) -> bool:
        return self._end.query()

    def wait(self) -> CopyTimes:
        self._end.synchronize()
        return self._job.moved(self._start.elapsed_time(self._end) / 1000)


def start(job: CopyJob, device: torch.device) -> Movement:
    """Do ``job`` now on a CPU, or queue it on the current stream of a CUDA ``device``."""
    if device.type == "cuda":
        return OnStream(job, device)
    begun = time.perf_counter()
    job.move()
    return Finished(job.moved(time.perf_counter() - begun))


class SwapPath(ABC):
    """Moves requests between the blocks of ``pool`` and spans of ``host_pool``; bits stay as they are.

    Raises RequestError when the two hold blocks of different shapes.
    """

    name: ClassVar[str]

    def __init__(self, pool: KVPool, host_pool: HostPool) -> None:
        if pool.shape != host_pool.shape:
            raise RequestError(
                f"swap: the pool holds {pool.shape}, the host pool {host_pool.shape}; give both one shape"
            )
        self.pool = pool
        self.host_pool = host_pool
        self._open = True

    def out(self, blocks: Sequence[int], span: Span) -> CopyTimes:
        """Copy ``blocks`` of the pool to ``span``, in their order. When it returns the blocks may be used again.

        Raises RequestError as ``into`` does.
        """
        return start(self._job(self._plan_out, blocks, span), self.pool.device).wait()

    def into(self, span: Span, blocks: Sequence[int]) -> Movement:
        """Copy ``span`` to ``blocks`` of the pool, in their order.

        Raises RequestError for a block that the pool does not have, a span of another size or one that was given back,
        and for a path that is closed.
        """
        transfer = start(self._job(self._plan_into, blocks, span), self.pool.device)
        transfer.wait()
        return transfer

    def close(self) -> None:
        """Wait for what is under way, and take nothing more."""
        self._open = False

    @abstractmethod
    def _plan_out(self, blocks: Sequence[int], span: Span) -> tuple[int, Move]:
        """Return the number of copies over the link, and the function that makes them all."""

    @abstractmethod
    def _plan_into(self, blocks: Sequence[int], span: Span) -> tuple[int, Move]:
        """Return the number of copies over the link that bring ``span`` back to ``blocks``, and the function that makes
        them all."""

    def _job(
        self, plan: Callable[[Sequence[int], Span], tuple[int, Move]], blocks: Sequence[int], span: Span
    ) -> CopyJob:
        """Make ``plan`` and time it. The checks are left out of that time: they are not what a path differs in."""
        if not self._open:
            raise RequestError(f"swap: the {self.name} path is closed; make another")
        if len(blocks) != span.blocks:
            raise RequestError(f"swap: {len(blocks)} blocks need a span of as many, not of {span.blocks}")
        if unknown_blocks := [block for block in blocks if not 0 <= block < self.pool.blocks]:
            raise RequestError(f"swap: block {unknown_blocks[0]} is not in the pool, which has {self.pool.blocks}")
        self.host_pool.require(span)
        begun = time.perf_counter()
        copies, move = plan(blocks, span)
        return CopyJob(move, copies, len(blocks) * self.pool.shape.block_bytes, time.perf_counter() - begun)
