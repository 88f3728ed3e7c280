"""Who decides whether a server has signed what it did not compute: a third that has the model computes it again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from firsttoken.study.errors import SwarmError
from firsttoken.study.foreign.schema import at_least
from firsttoken.swarm.room import Room
from firsttoken.swarm.stack import BlockStack
from firsttoken.swarm.trust.evidence import Evidence
from firsttoken.swarm.trust.ledger import Ledger
from firsttoken.swarm.wire import Stretch

TOLERANCE = 1e-3
"""Of a row's norm, that honest float32 servers may differ by: the order in which they add. Notebook 54 measures it."""


@dataclass(frozen=True)
class Sentence:
    """Whether the accused is ``convicted``, by what ``difference`` of a row's norm, and the points ``taken`` of it."""

    convicted: bool
    difference: Annotated[float, at_least(0.0)]
    taken: Annotated[int, at_least(0)]


class Court:
    """Judges servers of ``model`` (sha256), whose copy is in ``folder``, and takes deposits from their accounts in
    ``ledger``; one case at a time, as each costs a prefill."""

    def __init__(self, folder: Path, model: str, ledger: Ledger, tolerance: float = TOLERANCE) -> None:
        self.folder, self.model, self.ledger, self.tolerance = folder, model, ledger, tolerance
        self._turn = asyncio.Lock()

    async def judge(self, evidence: Evidence) -> Sentence:
        """Compute what the accused says it has, and convict it if that differs by more than the tolerance.

        Raises SwarmError, before anything is computed, for evidence that proves nothing, another model, and a server
        that was convicted before; and for blocks that cannot be loaded.
        """
        evidence.check()
        commitment = evidence.charge.commitment
        if commitment.model != self.model:
            raise SwarmError(f"this court has the model {self.model[:12]}, not {commitment.model[:12]}")
        self.ledger.check_standing(commitment.server)
        async with self._turn:
            there = await asyncio.to_thread(recomputed, self.folder, range(*commitment.layers), evidence.inputs)
            apart = difference(evidence.outputs, there[-len(evidence.outputs) :])
            if apart <= self.tolerance:
                return Sentence(False, apart, 0)
            return Sentence(True, apart, self.ledger.convict(commitment.server, evidence.charge.accuser))


def recomputed(folder: Path, layers: range, inputs: Tensor) -> Tensor:
    """``inputs`` [tokens, hidden] float32 after ``layers`` of the model in ``folder``, loaded for this.

    Raises SwarmError and ModelError as ``BlockStack``, RequestError beyond the context.
    """
    stack = BlockStack(folder, layers, torch.float32, len(inputs))
    room = Room(stack.pool.blocks, stack.pool.shape.block_tokens, 1, stack.context)
    (out,) = stack.run(layers, room.place({}, [Stretch(0, 0, len(inputs))]), [inputs])
    return out


def difference(said: Tensor, there: Tensor) -> float:
    """The largest, over the rows of two [tokens, hidden], of their distance over the norm of what should be there."""
    apart = torch.linalg.vector_norm(said - there, dim=1)
    return float((apart / torch.linalg.vector_norm(there, dim=1).clamp_min(1e-30)).max())
