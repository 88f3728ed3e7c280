"""What a server says it has computed, in its own hand (PETALS, section 4, security).

With each answer goes a digest of all that entered for it and of what left, signed by the key that signs the server's
announcements. Whoever holds the inputs can compute them again, and show a third that the server signed something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from torch import Tensor

from firsttoken.assets.model_config import MOST_LAYERS
from firsttoken.petals.keys import check_signature, public_hex, signature_of
from firsttoken.petals.wire import Stretch
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import Damaged
from firsttoken.study.parsing.schema import between, digits, shaped, some

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_DOMAIN = b"firsttoken swarm commitment 1\n"
_Layer = Annotated[int, between(0, MOST_LAYERS)]
_Token = Annotated[int, between(0, 1 << 31)]
_Sha256 = Annotated[str, digits(64)]


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
    steps: Annotated[tuple[CommittedStep, ...], some]
    signature: Annotated[str, digits(128)] = "0" * 128

    def signed(self, key: Ed25519PrivateKey) -> Commitment:
        """This with the signature of its server's ``key``."""
        return replace(self, signature=signature_of(key, _DOMAIN, asdict(self)))

    def check(self) -> None:
        """Raise SwarmError unless its server signed it."""
        check_signature(self.server, _DOMAIN, asdict(self), f"a commitment of {self.server[:8]}")


def read_commitment(text: str) -> Commitment:
    """A commitment as JSON gives it, its signature checked. Raises SwarmError for what is none."""
    try:
        commitment = shaped(Commitment, parse_json(text))
    except (Damaged, ValueError) as error:
        raise SwarmError(f"an answer carries no commitment: {error}") from error
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
    return hashlib.sha256(rows.detach().contiguous().numpy().tobytes()).hexdigest()


def committed(step: CommittedStep, layer: int, inputs: Tensor, outputs: Tensor) -> bool:
    """Whether ``step`` is of these ``inputs`` [end, hidden], which entered ``layer``, and ``outputs``."""
    shapes = len(inputs) == step.end and len(outputs) == step.end - step.start > 0
    return shapes and digest_rows(inputs, layer)[-1].hex() == step.inputs and digest_of(outputs) == step.outputs


class Committer:
    """Signs what a server of ``model`` (sha256) has computed, with its ``key``."""

    def __init__(self, key: Ed25519PrivateKey, model: str) -> None:
        self._key, self._server, self._model = key, public_hex(key), model

    def commit(
        self, layers: range, trails: Sequence[list[bytes]], stretches: Sequence[Stretch], hidden: Tensor, out: Tensor
    ) -> str:
        """Sign, as JSON, that ``hidden`` [tokens, hidden] of ``stretches``, end to end, became ``out`` in ``layers``.

        ``trails`` are the digests of the rows of each sequence so far; those of the step are written to them.
        """
        steps, tokens = [], [one.end - one.start for one in stretches]
        for one, trail, rows, said in zip(stretches, trails, hidden.split(tokens), out.split(tokens), strict=True):
            trail[one.start :] = digest_rows(rows, layers.start, trail[one.start - 1] if one.start else b"")
            steps.append(CommittedStep(one.start, one.end, trail[-1].hex(), digest_of(said)))
        unsigned = Commitment(self._server, self._model, (layers.start, layers.stop), tuple(steps))
        return json.dumps(asdict(unsigned.signed(self._key)))
