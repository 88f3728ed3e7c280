"""What a message of a swarm says beside its numbers, and what a session is opened with: bytes alone, so that a client
that has imported no torch yet can ask a server, too."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from firsttoken.petals.states import Stretch
from firsttoken.study.parsing.safetensors_header import METADATA

SERVICE = "firsttoken.Swarm"
SESSION, PASS, EXCHANGE, ACCUSE = (f"/{SERVICE}/{call}" for call in ("Session", "Pass", "Exchange", "Accuse"))
"""The calls of a server over gRPC."""

VERSION = "2"
HEADERS = ("swarm-version", "swarm-model", "swarm-blocks", "swarm-coding")
"""What a session is opened with, in this order: version of the messages, sha256 of the model, a:b, coding."""

ADAPTER = "swarm-adapter"
"""And, for a variant of the model, the name of its adapter, as servers announce it."""

NAMED_TOKENS = 16
"""Tokens of a block of keys and values that has a name. A server whose blocks have other sizes finds none."""
MOST_NAMES = 1024  # of a message that asks for the beginnings of sequences


SIZES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number in each dtype that hidden states travel in, by safetensors' names."""


class UsualMessage(NamedTuple):
    """A message that holds hidden states alone: of ``stretches``, in ``dtype`` (safetensors' name) and ``shape``, whose
    numbers begin at ``start``. An answer has no stretches, and a ``commitment`` where its server vouches for it."""

    stretches: tuple[Stretch, ...]
    dtype: str
    shape: tuple[int, int]
    start: int
    commitment: str


def told_step(
    stretches: Sequence[Stretch] = (),
    finished: Collection[int] = (),
    first: int = 0,
    names: Mapping[int, Sequence[str]] = MappingProxyType({}),
    shared: Mapping[int, int] = MappingProxyType({}),
) -> str:
    """The step of a message, as JSON; ``wire.Message`` says what its parts are."""
    header: dict[str, object] = {"stretches": list(stretches), "over": list(finished)}
    more = {"first": first, "names": list(names.items()), "shared": list(shared.items())}
    return json.dumps(header | {name: value for name, value in more.items() if value})


def laid_out(numbers: memoryview, dtype: str, shape: Sequence[int], metadata: Mapping[str, str]) -> bytes:
    """The safetensors file of hidden states [tokens, hidden] alone, whose ``numbers`` are in ``dtype`` (its name
    there).

    Between two steps the weights of a span have gone through the processor's caches, and a call costs what it takes to
    come from memory: 0.02 ms as it is here, by safetensors' ``save`` 0.1.
    """
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, numbers.nbytes]}
    header = json.dumps({METADATA: metadata, "hidden": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # what follows is aligned, as the format wants it
    return b"".join((len(header).to_bytes(8, "little"), header, numbers))


_NUMBER = "(?:0|[1-9][0-9]{0,8})"  # below 1 << 31
_STEP = rf"\[{_NUMBER}, {_NUMBER}, {_NUMBER}\]"
_PLAIN = r"[ !#-\[\]-~]*"  # in a JSON string, none of these is escaped
_USUAL = re.compile(
    rf"""\{{"{METADATA}":\{{(?:"commitment":"({_PLAIN}(?:\\"{_PLAIN})*)",)?"""
    rf""""step":"\{{\\"stretches\\": \[({_STEP}(?:, {_STEP})*)?\], \\"over\\": \[\]\}}"\}},"""
    rf""""hidden":\{{"dtype":"([A-Z0-9]+)","shape":\[({_NUMBER}),({_NUMBER})\],"""
    rf""""data_offsets":\[0,({_NUMBER})\]\}}\}} *""".encode()
)
"""The header of a step or its answer, as ``laid_out`` writes it."""


def usual_message(data: bytes) -> UsualMessage | None:
    """Parse ``data``, a message whose header is laid out as by ``laid_out``, and whose numbers are as many as it says;
    None for any other, which needs the full parser."""
    start = 8 + int.from_bytes(data[:8], "little")
    if start % 8 or (match := _USUAL.fullmatch(data, 8, start)) is None:  # numbers are aligned
        return None
    commitment, listed, named, *counts = match.groups()
    tokens, width, size = map(int, counts)
    dtype = named.decode()
    if not size == len(data) - start == tokens * width * SIZES.get(dtype, 0):
        return None
    stretch_texts = listed[1:-1].split(b"], [") if listed else []
    stretches = tuple(Stretch(*map(int, stretch_text.split(b", "))) for stretch_text in stretch_texts)
    commitment_text = commitment.decode().replace('\\"', '"') if commitment else ""
    return UsualMessage(stretches, dtype, (tokens, width), start, commitment_text)
