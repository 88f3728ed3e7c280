"""A client's spot checks: a share of the answers is computed again elsewhere, and who signed something else is charged.

Whoever lies in a share p of its answers is found in a step with the rate's share of p; it cannot tell which are looked
at, as every answer is signed and the draw is made when it is here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firsttoken.study.errors import FirstTokenError, SwarmError
from firsttoken.study.foreign.faults import Damaged
from firsttoken.study.foreign.json_text import parse_json
from firsttoken.study.foreign.schema import shaped
from firsttoken.swarm.line import Line, ServerFault
from firsttoken.swarm.records import Record
from firsttoken.swarm.service import ACCUSE
from firsttoken.swarm.swarm import Swarm
from firsttoken.swarm.trust.commitments import committed, read_commitment
from firsttoken.swarm.trust.court import TOLERANCE, Sentence, difference
from firsttoken.swarm.trust.evidence import Charge, Evidence
from firsttoken.swarm.wire import MOST_TOKENS, Stretch

AGREED, CONVICTED, WITNESS, INCONCLUSIVE = "agreed", "convicted", "its witness convicted", "inconclusive"
"""How an audit ends; the last where nobody else has the blocks, answers, or can judge."""


class DoubtFault(ServerFault):
    """This server is not to be believed: what it has answered so far may be wrong, too."""


@dataclass(frozen=True)
class Audits:
    """A share ``rate`` of the answers is computed again by another server. What differs by more than ``tolerance`` of a
    row's norm is brought before ``keeper`` (HOST:PORT), which gives the deposit of who lied to ``accuser`` (a subkey).
    ``seed`` None draws what nobody can foretell. Raises SwarmError for what is no rate or tolerance."""

    rate: float
    keeper: str
    accuser: str
    tolerance: float = TOLERANCE
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1 or not self.tolerance > 0:
            raise SwarmError(f"a rate of audits lies between 0 and 1, a tolerance above 0, not {self}")


@dataclass
class Auditor:
    """Looks at what servers of ``swarm`` answer, as ``audits`` say; ``ends`` counts how audits ended, ``differences``
    are those found, ``recomputed`` tokens x blocks of all of them."""

    swarm: Swarm
    audits: Audits
    ends: Counter[str] = field(default_factory=Counter)
    differences: list[float] = field(default_factory=list)
    recomputed: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.audits.seed)

    async def look(
        self, line: Line, record: Record, message: Sequence[Stretch], inputs: Sequence[Tensor], said: Tensor
    ) -> None:
        """Perhaps check what the server of ``record`` has ``said`` [tokens, hidden] to ``message`` through ``line``.

        ``inputs`` [end, hidden] is all that entered of each sequence of the message. Raises DoubtFault for a server
        that did not sign its answer, or lied.
        """
        if self._draw.random() >= self.audits.rate:
            return
        at = self._draw.randrange(len(message))
        outputs = said.split([one.end - one.start for one in message])[at]
        evidence = self._signed(line, record, at, inputs[at], outputs)
        try:
            end = await self._audited(evidence, record)
        except (FirstTokenError, Damaged):  # whoever it was that failed here: nothing is proven
            end = INCONCLUSIVE
        self.ends[end] += 1
        if end == CONVICTED:
            raise DoubtFault(f"{record.name} has signed what it did not compute: it was convicted")

    def _signed(self, line: Line, record: Record, at: int, inputs: Tensor, outputs: Tensor) -> Evidence:
        try:
            commitment = read_commitment(line.commitment)
            said = commitment.server, commitment.model, commitment.layers
            if said != (record.server, self.swarm.model, (line.layers.start, line.layers.stop)):
                raise SwarmError("its commitment is another's, or of other blocks")
            charge = Charge(commitment, at, self.audits.accuser)
            if not committed(charge.committed, line.layers.start, inputs, outputs):
                raise SwarmError("its commitment is of other inputs or outputs")
        except SwarmError as error:
            raise DoubtFault(f"{record.name} does not vouch for its answer: {error}") from error
        return Evidence(charge, inputs, outputs)

    async def _audited(self, evidence: Evidence, record: Record) -> str:
        """How the audit ends. Raises FirstTokenError where nobody else has the blocks, answers or can judge."""
        start, stop = evidence.charge.commitment.layers
        others = [
            one
            for one in self.swarm.servers()
            if one.server != record.server and one.blocks[0] <= start and stop <= one.blocks[1]
        ]
        if not others:
            raise SwarmError(f"nobody else has blocks {start} to {stop - 1}")
        witness = self._draw.choice(others)
        line = self.swarm.line(witness, range(start, stop), "float32")
        try:
            parts = []
            for first in range(0, len(evidence.inputs), MOST_TOKENS):
                rows = evidence.inputs[first : first + MOST_TOKENS]
                parts.append(await line.run([Stretch(0, first, first + len(rows))], rows))
        finally:
            line.close()
        self.recomputed += (work := len(evidence.inputs) * (stop - start))
        self.swarm.served[witness.server] += work
        apart = difference(evidence.outputs, torch.cat(parts)[-len(evidence.outputs) :])
        self.differences.append(apart)
        if apart <= self.audits.tolerance:
            return AGREED
        if await self._convicts(evidence):
            return CONVICTED
        charge = Charge(read_commitment(line.commitment), 0, self.audits.accuser)
        return WITNESS if await self._convicts(Evidence(charge, evidence.inputs, parts[-1])) else INCONCLUSIVE

    async def _convicts(self, evidence: Evidence) -> bool:
        """Whether the keeper finds that the server lied. Raises SwarmError where it does not judge."""
        import grpc

        call = self.swarm.channel(self.audits.keeper).stream_unary(ACCUSE)
        swarm = self.swarm
        try:
            data = await call(
                iter(list(evidence.messages())), timeout=swarm.patience.find_s, metadata=swarm.access.headers
            )
        except grpc.aio.AioRpcError as error:
            raise SwarmError(error.details() or error.code().name) from error
        convicted = shaped(Sentence, parse_json(data)).convicted
        if convicted:
            swarm.convicted.add(evidence.charge.commitment.server)
        return convicted
