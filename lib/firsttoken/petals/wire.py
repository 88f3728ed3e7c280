"""Hidden states as messages: safetensors bytes, never pickle, whose header is held against itself, against the step
that they belong to and against a limit before memory is taken for what it names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated

import torch
from safetensors.torch import load, save
from torch import Tensor

from firsttoken.petals.int8_transport import pack, unpack
from firsttoken.petals.message_headers import laid_out, told_step, usual_message
from firsttoken.petals.states import MOST_TOKENS, Stretch, check_states
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import Damaged
from firsttoken.study.parsing.safetensors_header import header_of
from firsttoken.study.parsing.schema import between, digits, shaped

CODINGS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
"""What hidden states travel in, by the name that a session is opened with."""

_MOST_HEADER = 1 << 18  # bytes: it is read before anything is known; what vouches for 512 sequences has half of it
_SHORT = 1024  # characters of a step that is remembered
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_Count = Annotated[int, between(0, 1 << 31)]
_Name = Annotated[str, digits(32)]


@dataclass(frozen=True)
class Message:
    """``hidden`` [tokens, hidden] of ``stretches``, end to end (None: it has none); sequences that are ``over``.

    ``first`` is the layer that the states enter, 0 for the first of the session's; ``commitment`` what the server that
    answers vouches for, as JSON, "" where it does not. ``names`` (32 hex digits each) are, by sequence, of the blocks
    that a step fills, from that of its first token on; a message without states asks which blocks of these names, from
    the first of the sequence on, are there. ``shared`` answers: so many tokens of a sequence. In the place of hidden
    states there may be ``kv`` [layers, 2, kv_heads, tokens, head_dim], the keys and values of the tokens of one.
    """

    stretches: tuple[Stretch, ...]
    hidden: Tensor | None
    over: tuple[int, ...] = ()
    first: int = 0
    commitment: str = ""
    names: tuple[tuple[int, tuple[str, ...]], ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    kv: Tensor | None = None


@dataclass(frozen=True)
class _ToldStep:
    stretches: tuple[tuple[_Count, _Count, _Count], ...] = ()
    over: tuple[_Count, ...] = ()
    first: _Count = 0
    names: tuple[tuple[_Count, tuple[_Name, ...]], ...] = ()
    shared: tuple[tuple[_Count, _Count], ...] = ()


def encode(
    hidden: Tensor | None,
    coding: str,
    stretches: Sequence[Stretch] = (),
    finished: Collection[int] = (),
    first: int = 0,
    commitment: str = "",
    names: Mapping[int, Sequence[str]] = MappingProxyType({}),
    shared: Mapping[int, int] = MappingProxyType({}),
    kv: Tensor | None = None,
) -> bytes:
    """The bytes of a message; an answer has neither ``stretches`` nor ``finished``, and a ``commitment`` where it has
    one. Raises SwarmError as ``pack``."""
    metadata = {"commitment": commitment} if commitment else {}
    metadata |= {"step": told_step(stretches, finished, first, names, shared)}
    if hidden is not None and kv is None and coding != "int8":
        states = hidden.detach().to(CODINGS[coding]).contiguous()
        numbers = states.view(torch.int16) if states.dtype is torch.bfloat16 else states  # numpy has none
        return laid_out(numbers.numpy().data, _NAMES[states.dtype], states.shape, metadata)
    tensors = {} if hidden is None else pack(hidden) if coding == "int8" else {"hidden": hidden.to(CODINGS[coding])}
    tensors |= {} if kv is None else {"kv": kv.contiguous()}
    return save(tensors, metadata)


def decode(
    data: bytes,
    coding: str,
    width: int,
    dtype: torch.dtype,
    tokens: int | None = None,
    kv_shape: tuple[int, int, int] | None = None,
) -> Message:
    """The message of these bytes, its hidden states in ``dtype``.

    ``tokens``: an answer to so many of them. With a ``kv_shape`` (layers, kv_heads, head_dim) there may be keys and
    values of that shape, in the dtype in which they come. Raises SwarmError for what is no message, or is not of this
    ``coding``, ``width``, shape or count, and for numbers that ``check_states`` refuses.
    """
    if (header_bytes := int.from_bytes(data[:8], "little")) > _MOST_HEADER:
        raise SwarmError(
            f"a message is no safetensors of a step: its header of {header_bytes} bytes is beyond {_MOST_HEADER}"
        )
    if coding != "int8" and (usual := _usual(data, coding, width, dtype, tokens)) is not None:
        return usual
    try:
        header = header_of(data)
        fields = _told(header.metadata.get("step", "{}"))
    except ValueError as error:
        fault = str(error) if isinstance(error, Damaged) else type(error).__name__
        raise SwarmError(f"a message is no safetensors of a step: {fault}") from error
    stretches = tuple(Stretch(*row) for row in fields.stretches)
    rows = _rows(stretches) if tokens is None else tokens
    if not header.tensors and not rows:
        return Message(stretches, None, fields.over, fields.first, names=fields.names, shared=fields.shared)
    if kv_shape is not None and list(header.tensors) == ["kv"]:
        layers, heads, head_dim = kv_shape
        header_bytes, wanted = header.tensors["kv"], (layers, 2, heads, rows, head_dim)
        if len(stretches) != 1 or header_bytes.shape != wanted or header_bytes.dtype not in _NAMES.values():
            raise SwarmError(
                f"keys and values {header_bytes.dtype} {list(header_bytes.shape)} do not fit: {list(wanted)} are wanted"
            )
        kv = load(data)["kv"]
        check_states(kv, "keys and values hold")
        return Message(stretches, None, fields.over, fields.first, names=fields.names, kv=kv)
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
    return Message(stretches, hidden, fields.over, fields.first, header.metadata.get("commitment", ""), fields.names)


def _usual(data: bytes, coding: str, width: int, dtype: torch.dtype, tokens: int | None) -> Message | None:
    """Decode hidden states alone whose header is the usual; None where ``decode`` has to look closer.

    With caches that are cold, as in ``laid_out``, a step is read in 0.04 ms, and in 0.14 by the way of any JSON.
    """
    kind, message = CODINGS[coding], usual_message(data)
    if message is None or message.dtype != _NAMES[kind]:
        return None
    rows = _rows(message.stretches) if tokens is None else tokens
    if not rows or message.shape != (rows, width):
        return None
    hidden = torch.frombuffer(bytearray(data), dtype=kind, offset=message.start).view(rows, width).to(dtype)
    check_states(hidden)
    return Message(message.stretches, hidden, commitment=message.commitment)


def _told(text: str) -> _ToldStep:
    return _known_step(text) if len(text) <= _SHORT else shaped(_ToldStep, parse_json(text))


@lru_cache(256)
def _known_step(text: str) -> _ToldStep:
    """Parse a step, and remember it: answers have an empty one, always the same."""
    return shaped(_ToldStep, parse_json(text))


def _rows(stretches: Sequence[Stretch]) -> int:
    if empty_stretch := next((stretch for stretch in stretches if not stretch.start < stretch.end), None):
        raise SwarmError(f"sequence {empty_stretch.number} has no tokens [{empty_stretch.start}, {empty_stretch.end})")
    if len({stretch.number for stretch in stretches}) < len(stretches):
        raise SwarmError("a sequence is in one step twice")
    if (rows := sum(stretch.end - stretch.start for stretch in stretches)) > MOST_TOKENS:
        raise SwarmError(f"a message of {rows} tokens; at most {MOST_TOKENS} are taken at once")
    return rows
