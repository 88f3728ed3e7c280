"""What a server says it has computed, in its own hand, and the evidence that it is wrong (PETALS, section 4, security).

With each answer goes a digest of all that entered for it and of what left, signed by the key that signs the server's
announcements. Whoever holds the inputs can compute them again. A commitment, what entered and what left are all that a
third needs to see that the server signed something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
from torch import Tensor

from firsttoken.assets.model_config import MOST_LAYERS
from firsttoken.petals.keys import ServerKey, check_signature, parse_foreign, public_hex, signature_of
from firsttoken.petals.messages import MOST_TOKENS, SequenceChunk, split_rows
from firsttoken.petals.wire import decode, encode
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.schema import between, digits, non_empty

_DOMAIN = b"firsttoken swarm commitment 1\n"
_Layer = Annotated[int, between(0, MOST_LAYERS)]
_Token = Annotated[int, between(0, 1 << 31)]
_Sha256 = Annotated[str, digits(64)]
_INPUTS, _OUTPUTS = 0, 1  # the sequences that they travel as


@dataclass(frozen=True)
class CommittedStep:
    """Tokens [start, end) of one sequence: sha256 of what entered, all its tokens from 0 on, and of what left."""

    start: _Token
    end: _Token
    inputs: _Sha256
    outputs: _Sha256


@dataclass(frozen=True)
class Commitment:
    """Says that ``server`` (its subkey) has computed ``steps`` through layers [start, stop) of ``model`` (sha256)."""

    server: _Sha256
    model: _Sha256
    layers: tuple[_Layer, _Layer]
    steps: Annotated[tuple[CommittedStep, ...], non_empty]
    signature: Annotated[str, digits(128)] = "0" * 128

    def check(self) -> None:
        """Raise SwarmError unless its server signed it."""
        check_signature(self.server, _DOMAIN, asdict(self), f"a commitment of {self.server[:8]}")


def read_commitment(text: str) -> Commitment:
    """A commitment as JSON gives it, its signature checked. Raises SwarmError for what is none."""
    commitment = parse_foreign(Commitment, text, "an answer carries no commitment")
    commitment.check()
    return commitment


def digest_rows(rows: Tensor, layer: int, before: bytes = b"") -> list[bytes]:
    """Return for each of ``rows`` [tokens, hidden] float32 that enter ``layer`` the sha256 of it and of all before it.

    ``before`` is the digest of the row that they follow: so it does not matter in how many pieces rows come.
    """
    digests, head = [], layer.to_bytes(4, "little")
    for row in rows.detach().contiguous().numpy():
        before = hashlib.sha256(before + head + row.tobytes()).digest()
        digests.append(before)
    return digests


def digest_of(rows: Tensor) -> str:
    """The sha256 (hex) of outputs [tokens, hidden] float32."""
    return hashlib.sha256(rows.detach().contiguous().numpy().data).hexdigest()


def committed(step: CommittedStep, layer: int, inputs: Tensor, outputs: Tensor) -> bool:
    """Return whether ``step`` is of these ``inputs`` [end, hidden], which entered ``layer``, and ``outputs``."""
    shapes = len(inputs) == step.end and len(outputs) == step.end - step.start > 0
    return shapes and digest_rows(inputs, layer)[-1].hex() == step.inputs and digest_of(outputs) == step.outputs


class Committer:
    """Signs what a server of ``model`` (sha256) has computed, with its ``key``."""

    def __init__(self, key: ServerKey, model: str) -> None:
        self._key, self._server, self._model = key, public_hex(key), model

    def commit(
        self, layers: range, trails: Sequence[list[bytes]], chunks: Sequence[SequenceChunk], hidden: Tensor, out: Tensor
    ) -> str:
        """Sign, as JSON, that ``hidden`` [tokens, hidden] of ``chunks``, end to end, became ``out`` in ``layers``.

        ``trails`` are the digests of the rows of each sequence so far; those of the step are written to them.
        """
        steps, rows_of_chunks, outputs_of_chunks = [], split_rows(hidden, chunks), split_rows(out, chunks)
        for chunk, trail, rows, outputs in zip(chunks, trails, rows_of_chunks, outputs_of_chunks, strict=True):
            trail[chunk.start :] = digest_rows(rows, layers.start, trail[chunk.start - 1] if chunk.start else b"")
            step = {"start": chunk.start, "end": chunk.end, "inputs": trail[-1].hex(), "outputs": digest_of(outputs)}
            steps.append(step)
        # A Commitment's fields, in plain dicts: to make dataclasses and take them apart again costs 0.05 ms of 0.14.
        fields = {"server": self._server, "model": self._model, "layers": (layers.start, layers.stop), "steps": steps}
        return json.dumps(fields | {"signature": signature_of(self._key, _DOMAIN, fields)})


@dataclass(frozen=True)
class Charge:
    """Says that step ``step`` of ``commitment`` is wrong."""

    commitment: Commitment
    step: Annotated[int, between(0, MOST_TOKENS)]

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
                yield encode(part, "float32", [SequenceChunk(number, start, start + len(part))])


async def read_evidence(messages: AsyncIterable[bytes], width: int, context: int) -> Evidence:
    """Read the evidence in ``messages``, of a model with states ``width`` wide and a ``context`` of so many tokens.

    Raises SwarmError for what is no evidence, or more than a sequence can be; its check is still to be made.
    """
    charge, parts = None, {_INPUTS: [torch.empty(0, width)], _OUTPUTS: [torch.empty(0, width)]}
    async for data in messages:
        if charge is None:
            charge = parse_foreign(Charge, data, "a charge cannot be read")
            if charge.committed.end > context:
                raise SwarmError(f"a sequence of {charge.committed.end} tokens exceeds the context of {context}")
            continue
        message = decode(data, "float32", width, torch.float32)
        if len(message.chunks) != 1 or (chunk := message.chunks[0]).number not in parts:
            raise SwarmError("after a charge come rows of its inputs, then of its outputs, and nothing else")
        sequence_parts = parts[chunk.number]
        if chunk.start != sum(map(len, sequence_parts)) or chunk.end > charge.committed.end:
            raise SwarmError(f"rows {chunk.start} to {chunk.end} are not those that come next, or are too many")
        sequence_parts.append(message.hidden)
    if charge is None:
        raise SwarmError("evidence begins with a charge")
    return Evidence(charge, torch.cat(parts[_INPUTS]), torch.cat(parts[_OUTPUTS]))
