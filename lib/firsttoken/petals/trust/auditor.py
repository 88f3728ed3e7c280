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

from firsttoken.petals.access import answer_of
from firsttoken.petals.keys import parse_foreign
from firsttoken.petals.messages import ACCUSE, MOST_TOKENS, SequenceChunk, split_rows
from firsttoken.petals.records import Record
from firsttoken.petals.routing import Hop, Reachable, best_chain
from firsttoken.petals.server_session import ServerSession, UnverifiedFault
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.trust.arbitration import TOLERANCE, AuditRuling, difference
from firsttoken.petals.trust.commitments import Charge, Evidence, committed, read_commitment
from firsttoken.study.errors import FirstTokenError, SwarmError

UNDECIDED = 0.5  # share of a server's audits that may find a difference of which nobody is convicted
_ENOUGH = 4  # audits of a server, before that is asked
_ALIKE = 1e12  # tokens a second: whom to ask is drawn, and not who is fastest
_CHAINS = 3  # of witnesses that are tried for one audit: some may be silent

AGREED, CONVICTED, WITNESS, INCONCLUSIVE = "agreed", "convicted", "its witness convicted", "inconclusive"
"""How an audit ends; the last where nobody else has the blocks, answers, or can judge."""


class _NoWitnessError(SwarmError):
    """Nobody else has the blocks, or answers."""


@dataclass(frozen=True)
class Audits:
    """A share ``rate`` of the answers is computed again by other servers. What differs by more than ``tolerance`` of a
    row's norm is brought before ``keeper`` (HOST:PORT), which judges who lied. A server is left, and where nobody else
    has its blocks the answer ends, when more than half of its audits found a difference of which the keeper convicts
    nobody. ``seed`` None draws what nobody can foretell. Raises SwarmError for what is no rate or tolerance."""

    rate: float
    keeper: str
    tolerance: float = TOLERANCE
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1 or not self.tolerance > 0:
            raise SwarmError(f"a rate of audits lies between 0 and 1, and a tolerance above 0, not {self}")


@dataclass
class Auditor:
    """Looks at what servers of ``swarm`` answer, as ``audits`` say; ``ends`` counts how audits ended, ``differences``
    are those found, ``recomputed`` tokens x blocks of all of them, ``why`` the last one was inconclusive."""

    swarm: Swarm
    audits: Audits
    ends: Counter[str] = field(default_factory=Counter)
    differences: list[float] = field(default_factory=list)
    recomputed: int = 0
    why: str = ""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.audits.seed)
        self._looked: Counter[str] = Counter()  # audits of each server, by subkey
        self._undecided: Counter[str] = Counter()  # of these, differences of which nobody was convicted
        self._excluded: set[str] = set()

    async def audit(
        self,
        session: ServerSession,
        record: Record,
        message: Sequence[SequenceChunk],
        inputs: Sequence[Tensor],
        answer: Tensor,
    ) -> None:
        """Perhaps check what the server of ``record`` has ``answer`` [tokens, hidden] to ``message`` through
        ``session``.

        ``inputs`` [end, hidden] is all that entered of each sequence of the message. Raises UnverifiedFault for a
        server that did not sign its answer, or lied, or of whose audits too many are inconclusive, and SwarmError where
        that is so and nobody else has its blocks.
        """
        if self._draw.random() >= self.audits.rate:
            return
        chunk_index = self._draw.randrange(len(message))
        outputs = split_rows(answer, message)[chunk_index]
        evidence = self._signed(session, record, chunk_index, inputs[chunk_index], outputs)
        try:
            end = await self.judged(evidence, record)
        except FirstTokenError as error:  # whoever it was that failed here: nothing is proven
            end, self.why = INCONCLUSIVE, str(error)
            self._undecided[record.server] += type(error) is not _NoWitnessError
        self.ends[end] += 1
        if end == CONVICTED:
            raise UnverifiedFault(f"{record.name} has signed what it did not compute: it was convicted")
        self._looked[record.server] += 1
        audits, undecided = self._looked[record.server], self._undecided[record.server]
        if audits >= _ENOUGH and undecided > UNDECIDED * audits:
            self._leave(record, session.layers, f"{undecided} of {audits} audits")

    def _leave(self, record: Record, layers: range, undecided: str) -> None:
        self._excluded.add(record.server)
        why = f"{undecided} of {record.name} showed nothing (the last: {self.why})"
        try:
            self._witnesses(layers, self._excluded)
        except SwarmError as error:
            raise SwarmError(f"{why}, and nobody else has its blocks") from error
        raise UnverifiedFault(why)

    def _signed(self, session: ServerSession, record: Record, index: int, inputs: Tensor, outputs: Tensor) -> Evidence:
        try:
            commitment = read_commitment(session.commitment)
            identity = commitment.server, commitment.model, commitment.layers
            if identity != (record.server, self.swarm.model, (session.layers.start, session.layers.stop)):
                raise SwarmError("its commitment is another's, or of other blocks")
            charge = Charge(commitment, index)
            if not committed(charge.committed, session.layers.start, inputs, outputs):
                raise SwarmError("its commitment is of other inputs or outputs")
        except SwarmError as error:
            raise UnverifiedFault(f"{record.name} does not vouch for its answer: {error}") from error
        return Evidence(charge, inputs, outputs)

    async def judged(self, evidence: Evidence, record: Record) -> str:
        """Return how the audit ends. Raises FirstTokenError where no other servers have the blocks, answer or can
        judge."""
        witnesses = await self.by_witnesses(evidence, record)
        apart = difference(evidence.outputs, witnesses[-1].outputs[-len(evidence.outputs) :])
        self.differences.append(apart)
        if apart <= self.audits.tolerance:
            return AGREED
        if await self._convicts(evidence):
            return CONVICTED
        for witness in witnesses:
            committed_to = witness.charge.committed
            witnessed = Evidence(witness.charge, witness.inputs, witness.outputs[committed_to.start : committed_to.end])
            if await self._convicts(witnessed):
                return WITNESS
        raise SwarmError("the answers differ, and the keeper finds nobody guilty")

    async def by_witnesses(self, evidence: Evidence, record: Record) -> list[Evidence]:
        """Return what others compute from the inputs, through one server or a chain of several: all rows, and the
        charge of the last message of each. Raises SwarmError where none have the blocks and answer."""
        without, blocks, why = {record.server}, range(*evidence.charge.commitment.layers), ""
        for _ in range(_CHAINS):
            rows, outputs = evidence.inputs, []
            try:
                chain = self._witnesses(blocks, without)
            except SwarmError as error:
                raise _NoWitnessError(f"others cannot compute it again: {why or error}") from error
            for hop, witness in chain:
                try:
                    outputs.append(await self._through(witness, hop.blocks, rows))
                except FirstTokenError as error:
                    why = str(error)
                    without.add(witness.server)
                    break
                rows = outputs[-1].outputs
            else:
                return outputs
        raise _NoWitnessError(f"others do not answer: {why}")

    def _witnesses(self, blocks: range, without: set[str]) -> list[tuple[Hop, Record]]:
        """A chain through ``blocks`` that nobody can foretell, of few servers. Raises SwarmError for none."""
        records = {record.server: record for record in self.swarm.servers() if record.server not in without}
        candidates = [
            Reachable(record.server, record.span, 1 + self._draw.random(), _ALIKE) for record in records.values()
        ]
        return [(hop, records[hop.server.name]) for hop in best_chain(candidates, blocks)]

    async def _through(self, witness: Record, blocks: range, inputs: Tensor) -> Evidence:
        session = self.swarm.open_session(witness, blocks, "float32")
        try:
            parts = []
            for first in range(0, len(inputs), MOST_TOKENS):
                rows = inputs[first : first + MOST_TOKENS]
                parts.append(await session.run([SequenceChunk(0, first, first + len(rows))], rows))
        finally:
            session.close()
        self.recomputed += len(inputs) * len(blocks)
        return Evidence(Charge(read_commitment(session.commitment), 0), inputs, torch.cat(parts))

    async def _convicts(self, evidence: Evidence) -> bool:
        """Return whether the keeper finds that the server lied. Raises SwarmError where it does not judge."""
        swarm = self.swarm
        accuse, messages = swarm.channel(self.audits.keeper).stream_unary(ACCUSE), iter(list(evidence.messages()))
        data = await answer_of(accuse, messages, swarm.access.headers, swarm.timeouts.find_s)
        convicted = parse_foreign(AuditRuling, data, "the keeper's ruling cannot be read").convicted
        if convicted:
            swarm.convicted.add(evidence.charge.commitment.server)
        return convicted
