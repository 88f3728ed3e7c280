"""The judge of whether a server signed what it did not compute: a third that has the model computes it again."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.fairness import TokenBuckets, remember
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.messages import SequenceChunk
from firsttoken.petals.records import Registry, steady_s
from firsttoken.petals.trust.commitments import Evidence
from firsttoken.study.errors import BusyError, SwarmError
from firsttoken.study.parsing.schema import at_least
from firsttoken.study.system.openmp import loops_on_one_core

TOLERANCE = 1e-3
"""Of a row's norm, that honest float32 servers may differ by: the order in which they add. Notebook 54 measures it."""

_ACCUSATIONS, _AGAIN_S = 4, 60.0  # of one place at once, and until it has another
_MOST = 4  # accusations that are heard at once
_MOST_CONVICTED = 4096


@dataclass(frozen=True)
class AuditRuling:
    """A judgement: the accused is ``convicted`` or not, for a ``difference`` relative to a row's norm."""

    convicted: bool
    difference: Annotated[float, at_least(0.0)]


class Arbitrator:
    """Judges servers of ``model`` (sha256), whose copy is in ``folder``; only those that ``registry`` has met.

    An accusation costs the accuser first: each place that they come from has ``_ACCUSATIONS`` and one more every
    ``_AGAIN_S``, and has it back where it was right. Cases are computed one at a time, on one core, below all else
    that this machine does.
    """

    def __init__(self, folder: Path, model: str, registry: Registry) -> None:
        self.folder, self.model, self._registry = folder, model, registry
        self._convicted: dict[str, None] = {}
        self._accusation_tokens = TokenBuckets(_ACCUSATIONS, _AGAIN_S)
        self._open = 0
        self._thread = ThreadPoolExecutor(1, "firsttoken-court", _below_others)

    @asynccontextmanager
    async def case(self) -> AsyncIterator[None]:
        """A context in which one accusation is heard. Raises BusyError where ``_MOST`` are being heard."""
        if self._open >= _MOST:
            raise BusyError(f"{self._open} accusations are being heard here, and no more at once")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def judge(self, evidence: Evidence, source: str) -> AuditRuling:
        """Compute what the accused says it has, and convict it if that differs by more than ``TOLERANCE``.

        Who was convicted before is convicted by its signature alone. Raises BusyError where who is at ``source`` has
        accused too often; SwarmError, before anything is computed, for evidence that proves nothing, another model, and
        a server that nobody has met here; and for blocks that cannot be loaded.
        """
        self._accusation_tokens.spend(source)
        evidence.check()
        commitment = evidence.charge.commitment
        if commitment.model != self.model:
            raise SwarmError(f"this keeper has the model {self.model[:12]}, not {commitment.model[:12]}")
        if commitment.server in self._convicted:
            return AuditRuling(True, 0.0)
        if not self._registry.met(commitment.server, steady_s()):
            raise SwarmError(f"{commitment.server[:8]} is not a server that this keeper has met: ask another")
        compute = partial(recomputed, self.folder, range(*commitment.layers), evidence.inputs)
        own_outputs = await asyncio.get_running_loop().run_in_executor(self._thread, compute)
        apart = difference(evidence.outputs, own_outputs[-len(evidence.outputs) :])
        if apart <= TOLERANCE:
            return AuditRuling(False, apart)
        self._accusation_tokens.refund(source)
        remember(self._convicted, commitment.server, None, _MOST_CONVICTED)
        return AuditRuling(True, apart)

    def close(self) -> None:
        """End the thread when its case is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _below_others() -> None:
    loops_on_one_core()
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def recomputed(folder: Path, layers: range, inputs: Tensor) -> Tensor:
    """``inputs`` [tokens, hidden] float32 after ``layers`` of the model in ``folder``, loaded for this.

    Raises SwarmError and ModelError as ``BlockBackend``, RequestError beyond the context.
    """
    backend = BlockBackend(folder, layers, torch.float32, len(inputs))
    room = KVSlots(backend.pool.blocks, backend.pool.shape.block_tokens, 1, backend.context)
    (out,) = backend.run(layers, room.place({}, [SequenceChunk(0, 0, len(inputs))]), [inputs])
    return out


def difference(outputs: Tensor, recomputed: Tensor) -> float:
    """The largest, over the rows of two [tokens, hidden], of their distance over the norm of what should be there."""
    apart = torch.linalg.vector_norm(outputs - recomputed, dim=1)
    return float((apart / torch.linalg.vector_norm(recomputed, dim=1).clamp_min(1e-30)).max())
