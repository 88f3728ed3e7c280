"""Clients of a swarm that do by a notebook's cell what the library's do by themselves.

They run in the process of the study, where the cell's classes and functions are. The servers are as they are.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import SequenceChunk
from firsttoken.petals.records import Record
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.server_session import ServerSession
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.trust.arbitration import difference, recomputed
from firsttoken.petals.trust.auditor import AGREED, CONVICTED, WITNESS, Auditor, Audits
from firsttoken.petals.trust.commitments import Evidence
from firsttoken.petals.tuning.client_adapters import Lora
from firsttoken.petals.tuning.passes import Adapters
from firsttoken.petals.tuning.remote_training import RemoteTraining, SpanInput, TrainingChain
from firsttoken.study.errors import SwarmError


class CellChain:
    """A chain of a notebook's cell, in the place of the library's.

    ``make`` is its class, called with the swarm and the layers of each server. It has in ``lines`` the session and the
    record of the server that it asks for each of these, and in ``lost`` the servers that it has left. Every generation
    has a new one, which knows of no server that was lost before.
    """

    def __init__(self, make: Callable[..., Any], model: RemoteModel, spans: Sequence[str]) -> None:
        self.layers, self.coding = model.chain.layers, model.chain.coding
        self._make, self._swarm = make, model.swarm
        self._spans = [range(*map(int, span.split(":"))) for span in spans]
        self._made = make(self._swarm, self._spans)

    @property
    def sessions(self) -> list[tuple[ServerSession, Record]]:
        return sorted(self._made.lines.values(), key=lambda line: line[0].layers.start)

    @property
    def faults(self) -> list[str]:
        """Return the servers that were replaced."""
        return list(self._made.lost)

    async def renew(self) -> None:
        """Begin a generation: with no session, and nothing that was sent before."""
        self.close()
        self._made = self._make(self._swarm, self._spans)

    async def run(self, chunks: Sequence[SequenceChunk], hidden: Tensor) -> Tensor:
        """Return ``hidden`` [tokens, hidden] of ``chunks`` after the layers."""
        return await self._made.run(chunks, hidden)

    async def forget(self, numbers: Sequence[int]) -> None:
        """Do nothing: the next generation has a new chain."""

    def close(self) -> None:
        for session, _ in self.sessions:
            session.close()


class CellAuditor(Auditor):
    """An auditor that asks a notebook's ``rule`` how an audit ends: ``rule(inputs, answer, signed, witness, keeper)``.

    ``signed`` are the sha256 of the inputs and of the answer that it is sure of: the server's signature has been read.
    ``witness`` and ``keeper`` compute the answer again. The rule runs in the client, and so does the keeper, in a
    thread and from the model in ``folder``; servers and witnesses are those of the swarm.
    """

    def __init__(self, swarm: Swarm, audits: Audits, rule: Callable[..., str], folder: Path) -> None:
        super().__init__(swarm, audits)
        self._rule, self._folder = rule, folder

    async def judged(self, evidence: Evidence, record: Record) -> str:
        witnesses, answer = await self.by_witnesses(evidence, record), evidence.outputs
        again = witnesses[-1].outputs[-len(answer) :]
        self.differences.append(difference(answer, again))

        def keeper(inputs: Tensor) -> Tensor:
            return recomputed(self._folder, range(*evidence.charge.commitment.layers), inputs)[-len(answer) :]

        signed = tuple(
            hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest() for rows in (evidence.inputs, answer)
        )
        end = await asyncio.to_thread(self._rule, evidence.inputs, answer, signed, lambda _: again, keeper)
        if end not in (AGREED, CONVICTED, WITNESS):
            raise SwarmError(f"the audit ends with {end!r}")
        guilty = {CONVICTED: [evidence], WITNESS: witnesses}.get(end, [])
        self.swarm.convicted |= {charged.charge.commitment.server for charged in guilty}
        return end


class _ServerOfChain(TrainingChain):
    """``blocks`` of a client's ``chain``, for a notebook's function to call as one server.

    That function hands back the gradient of what entered. Those of LoRA's halves are added to them here.
    """

    def __init__(self, chain: TrainingChain, blocks: range, lora: Lora | None) -> None:
        super().__init__(chain.swarm, blocks)
        self.faults, self._chain, self._lora = chain.faults, chain, lora

    async def forward(self, *inputs: Any) -> tuple[Tensor, list[list[SpanInput]]]:
        out = await super().forward(*inputs)
        self._count()
        return out

    async def backward(self, *inputs: Any) -> tuple[Tensor, Adapters]:
        first, sums = await super().backward(*inputs)
        self._count()
        for key, halves in self._lora.adapters().items() if self._lora is not None else ():
            for half, gradient in zip(halves, sums.get(key, ()), strict=False):
                half.grad = gradient if half.grad is None else half.grad + gradient
        return first, sums

    def _count(self) -> None:
        self._chain.moved_bytes += self.moved_bytes
        self.moved_bytes = 0


class CellTraining(RemoteTraining):
    """A client whose way through its servers is a notebook's ``function``, called as ``apply(hidden, *servers)``.

    It runs here, in the client; a server is a function of hidden states whose passes, forward and backward, are those
    of real servers.
    """

    function: Any = None

    def through(self, chain: TrainingChain, hidden: Tensor) -> Tensor:
        hops = wait_for(chain.swarm.route(chain.layers))
        parts = [_ServerOfChain(chain, hop.blocks, self.lora) for hop, _ in hops]
        through = super().through
        servers = [partial(through, part) for part in parts]
        return self.function.apply(hidden.requires_grad_(torch.is_grad_enabled()), *servers)
