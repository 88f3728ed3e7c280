"""Hidden states as messages: safetensors bytes, never pickle, whose header is held against itself, against the step
that they belong to and against a limit before memory is taken for what it names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from safetensors.torch import load, save
from torch import Tensor

from firsttoken.petals.int8_transport import pack, unpack
from firsttoken.petals.messages import MOST_TOKENS, SequenceChunk, check_states
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError
from firsttoken.study.parsing.safetensors_header import METADATA, header_of
from firsttoken.study.parsing.schema import between, parse_as

CODINGS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
"""What hidden states travel in, by the name that a session is opened with."""

_MOST_HEADER = 1 << 18  # bytes: it is read before anything is known; what vouches for 512 sequences has half of it
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_Count = Annotated[int, between(0, 1 << 31)]

_NUMBER = "(?:0|[1-9][0-9]{0,8})"  # below 1 << 31
_STEP = rf"\[{_NUMBER}, {_NUMBER}, {_NUMBER}\]"
_PLAIN = r"[ !#-\[\]-~]*"  # in a JSON string, none of these is escaped
_USUAL = re.compile(
    rf"""\{{"{METADATA}":\{{(?:"commitment":"({_PLAIN}(?:\\"{_PLAIN})*)",)?"""
    rf""""step":"\{{\\"chunks\\": \[({_STEP}(?:, {_STEP})*)?\], \\"over\\": \[\]\}}"\}},"""
    rf""""hidden":\{{"dtype":"([A-Z0-9]+)","shape":\[({_NUMBER}),({_NUMBER})\],"""
    rf""""data_offsets":\[0,({_NUMBER})\]\}}\}} *""".encode()
)
"""The header of a step or its answer, as ``_safetensors`` writes it."""


@dataclass(frozen=True)
class Message:
    """``hidden`` [tokens, hidden] of ``chunks``, end to end (None: it has none); sequences that are ``over``.

    ``first`` is the layer that the states enter, 0 for the first of the session's; ``commitment`` what the server that
    answers vouches for, as JSON, "" where it does not.
    """

    chunks: tuple[SequenceChunk, ...]
    hidden: Tensor | None
    over: tuple[int, ...] = ()
    first: int = 0
    commitment: str = ""


@dataclass(frozen=True)
class _StepFields:
    chunks: tuple[tuple[_Count, _Count, _Count], ...] = ()
    over: tuple[_Count, ...] = ()
    first: _Count = 0


def encode(
    hidden: Tensor | None,
    coding: str,
    chunks: Sequence[SequenceChunk] = (),
    finished: Collection[int] = (),
    first: int = 0,
    commitment: str = "",
) -> bytes:
    """The bytes of a message; an answer has neither ``chunks`` nor ``finished``, and a ``commitment`` where it has
    one. Raises SwarmError as ``pack``."""
    step: dict[str, object] = {"chunks": list(chunks), "over": list(finished)} | ({"first": first} if first else {})
    metadata = {"commitment": commitment} if commitment else {}
    metadata["step"] = json.dumps(step)
    if hidden is not None and coding != "int8":
        states = hidden.detach().to(CODINGS[coding]).contiguous()
        numbers = states.view(torch.int16) if states.dtype is torch.bfloat16 else states  # numpy has none
        return _safetensors(numbers.numpy().data, _NAMES[states.dtype], states.shape, metadata)
    return save({} if hidden is None else pack(hidden), metadata)


def _safetensors(numbers: memoryview, dtype: str, shape: Sequence[int], metadata: Mapping[str, str]) -> bytes:
    """The safetensors file of hidden states [tokens, hidden] alone, whose ``numbers`` are in ``dtype`` (its name
    there).

    Between two steps the weights of a span have gone through the processor's caches, and a call costs what it takes to
    come from memory: 0.02 ms as it is here, by safetensors' ``save`` 0.1.
    """
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, numbers.nbytes]}
    header = json.dumps({METADATA: metadata, "hidden": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # what follows is aligned, as the format wants it
    return b"".join((len(header).to_bytes(8, "little"), header, numbers))


def decode(data: bytes, coding: str, width: int, dtype: torch.dtype, tokens: int | None = None) -> Message:
    """The message of these bytes, its hidden states in ``dtype``.

    ``tokens``: an answer to so many of them. Raises SwarmError for what is no message, or is not of this ``coding``,
    ``width`` or count, and for numbers that ``check_states`` refuses.
    """
    if (header_bytes := int.from_bytes(data[:8], "little")) > _MOST_HEADER:
        fault = f"its header of {header_bytes} bytes is beyond {_MOST_HEADER}"
        raise SwarmError(f"a message is no safetensors of a step: {fault}")
    if coding != "int8" and (usual := _usual(data, coding, width, dtype, tokens)) is not None:
        return usual
    try:
        header = header_of(data)
        fields = parse_as(_StepFields, parse_json(header.metadata.get("step", "{}")))
    except ValueError as error:
        fault = str(error) if isinstance(error, ParseError) else type(error).__name__
        raise SwarmError(f"a message is no safetensors of a step: {fault}") from error
    chunks = tuple(SequenceChunk(*row) for row in fields.chunks)
    rows = _rows(chunks) if tokens is None else tokens
    if not header.tensors and not rows:
        return Message(chunks, None, fields.over, fields.first)
    main = header.tensors.get("codes" if coding == "int8" else "hidden")
    if main is None or (coding != "int8" and len(header.tensors) > 1):
        raise SwarmError(f"a message holds {', '.join(sorted(header.tensors)) or 'nothing'}, no hidden states {coding}")
    if main.shape != (rows, width):
        raise SwarmError(f"hidden states of {list(main.shape)} do not fit: the step has {[rows, width]}")
    if coding != "int8" and main.dtype != _NAMES[CODINGS[coding]]:
        raise SwarmError(f"hidden states in {main.dtype} came where the session was opened for {coding}")
    tensors = load(data)
    hidden = unpack(tensors, dtype) if coding == "int8" else tensors["hidden"].to(dtype)
    check_states(hidden)
    return Message(chunks, hidden, fields.over, fields.first, header.metadata.get("commitment", ""))


def _usual(data: bytes, coding: str, width: int, dtype: torch.dtype, tokens: int | None) -> Message | None:
    """Decode hidden states alone whose header is laid out as by ``_safetensors``; None where ``decode`` has to look
    closer.

    With caches that are cold, as there, a step is read in 0.04 ms, and in 0.14 by the way of any JSON.
    """
    start, kind = 8 + int.from_bytes(data[:8], "little"), CODINGS[coding]
    if start % 8 or (match := _USUAL.fullmatch(data, 8, start)) is None:  # numbers are aligned
        return None
    commitment, listed, name, *counts = match.groups()
    *shape, size = map(int, counts)
    if name.decode() != _NAMES[kind] or not size == len(data) - start == shape[0] * shape[1] * kind.itemsize:
        return None
    chunk_texts = listed[1:-1].split(b"], [") if listed else []
    chunks = tuple(SequenceChunk(*map(int, chunk_text.split(b", "))) for chunk_text in chunk_texts)
    rows = _rows(chunks) if tokens is None else tokens
    if not rows or shape != [rows, width]:
        return None
    hidden = torch.frombuffer(bytearray(data), dtype=kind, offset=start).view(rows, width).to(dtype)
    check_states(hidden)
    return Message(chunks, hidden, commitment=commitment.decode().replace('\\"', '"') if commitment else "")


def _rows(chunks: Sequence[SequenceChunk]) -> int:
    if empty_chunk := next((chunk for chunk in chunks if not chunk.start < chunk.end), None):
        raise SwarmError(f"sequence {empty_chunk.number} has no tokens [{empty_chunk.start}, {empty_chunk.end})")
    if len({chunk.number for chunk in chunks}) < len(chunks):
        raise SwarmError("a sequence is in one step twice")
    if (rows := sum(chunk.tokens for chunk in chunks)) > MOST_TOKENS:
        raise SwarmError(f"a message of {rows} tokens; at most {MOST_TOKENS} are taken at once")
    return rows
