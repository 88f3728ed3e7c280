"""A commitment, what entered and what left: all that a third needs to see that a server has signed something else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
from torch import Tensor

from firsttoken.petals.trust.commitments import Commitment, CommittedStep, committed
from firsttoken.petals.wire import MOST_TOKENS, Stretch, decode, encode
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import Damaged
from firsttoken.study.parsing.schema import between, digits, shaped

_INPUTS, _OUTPUTS = 0, 1  # the sequences that they travel as


@dataclass(frozen=True)
class Charge:
    """Says that step ``step`` of ``commitment`` is wrong; ``accuser`` is the key to which the deposit is due."""

    commitment: Commitment
    step: Annotated[int, between(0, MOST_TOKENS)]
    accuser: Annotated[str, digits(64)]

    @property
    def committed(self) -> CommittedStep:
        """The step. Raises SwarmError where the commitment has none of this number."""
        if self.step >= len(self.commitment.steps):
            raise SwarmError(f"the commitment has {len(self.commitment.steps)} steps, and none is number {self.step}")
        return self.commitment.steps[self.step]


@dataclass(frozen=True)
class Evidence:
    """``charge`` with the ``inputs`` [end, hidden] and ``outputs`` [end - start, hidden] of its step, float32."""

    charge: Charge
    inputs: Tensor
    outputs: Tensor

    def check(self) -> None:
        """Raise SwarmError unless the server signed just this."""
        self.charge.commitment.check()
        if not committed(self.charge.committed, self.charge.commitment.layers[0], self.inputs, self.outputs):
            raise SwarmError(
                f"{self.charge.commitment.server[:8]} has signed other inputs or outputs: this proves nothing"
            )

    def messages(self) -> Iterator[bytes]:
        """Yield the messages in which the evidence is sent."""
        yield json.dumps(asdict(self.charge)).encode()
        for number, rows in ((_INPUTS, self.inputs), (_OUTPUTS, self.outputs)):
            for start in range(0, len(rows), MOST_TOKENS):
                part = rows[start : start + MOST_TOKENS]
                yield encode(part, "float32", [Stretch(number, start, start + len(part))])


async def read_evidence(messages: AsyncIterable[bytes], width: int, context: int) -> Evidence:
    """What was sent of a model with states ``width`` wide and so many tokens of ``context``.

    Raises SwarmError for what is no evidence, or more than a sequence can be; its check is still to be made.
    """
    charge, parts = None, {_INPUTS: [torch.empty(0, width)], _OUTPUTS: [torch.empty(0, width)]}
    async for data in messages:
        if charge is None:
            charge = _charge(data)
            if charge.committed.end > context:
                raise SwarmError(f"a sequence of {charge.committed.end} tokens exceeds the context of {context}")
            continue
        message = decode(data, "float32", width, torch.float32)
        if len(message.stretches) != 1 or (one := message.stretches[0]).number not in parts:
            raise SwarmError("after a charge come rows of its inputs, then of its outputs, and nothing else")
        known = parts[one.number]
        if one.start != sum(map(len, known)) or one.end > charge.committed.end:
            raise SwarmError(f"rows {one.start} to {one.end} are not those that come next, or are too many")
        known.append(message.hidden)
    if charge is None:
        raise SwarmError("evidence begins with a charge")
    return Evidence(charge, torch.cat(parts[_INPUTS]), torch.cat(parts[_OUTPUTS]))


def _charge(data: bytes) -> Charge:
    try:
        return shaped(Charge, parse_json(data))
    except (Damaged, ValueError) as error:
        raise SwarmError(f"a charge cannot be read: {error}") from error
