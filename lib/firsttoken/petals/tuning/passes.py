"""One pass of a batch through a server's blocks as a message: hidden states, the client's LoRA, and what comes back.

As in ``wire``: safetensors, whose header is held against itself and the pass before memory is taken for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from safetensors.torch import load, save
from torch import Tensor

from firsttoken.petals.messages import MOST_TOKENS, check_states
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError
from firsttoken.study.parsing.safetensors_header import header_of
from firsttoken.study.parsing.schema import between, parse_as

HIDDEN, GRADIENT = "hidden", "gradient"
_HALF = re.compile(r"(\d{1,6})/([a-z0-9_.]{1,100})/([AB])")
Adapters = dict[tuple[int, str], tuple[Tensor, Tensor]]
"""LoRA's halves A [rank, in] and B [out, rank], by layer and the linear module's name within it."""


@dataclass(frozen=True)
class Pass:
    """``hidden`` [rows, tokens, hidden] through blocks with ``adapters`` of strength ``scaling``; with a ``gradient``
    of what comes out, of the same shape, backward."""

    hidden: Tensor
    adapters: Adapters
    scaling: float = 1.0
    gradient: Tensor | None = None


@dataclass(frozen=True)
class _PassFields:
    shape: tuple[Annotated[int, between(1, MOST_TOKENS)], Annotated[int, between(1, MOST_TOKENS)]]
    scaling: Annotated[float, between(-1e6, 1e6)] = 1.0


def encode_pass(tuning_pass: Pass) -> bytes:
    """The bytes of a pass, and of its answer: hidden states or their gradient, and the gradients of the adapters."""
    tensors = {HIDDEN: tuning_pass.hidden.flatten(0, 1)}
    if tuning_pass.gradient is not None:
        tensors[GRADIENT] = tuning_pass.gradient.flatten(0, 1)
    for (layer, module), halves in tuning_pass.adapters.items():
        tensors |= {f"{layer}/{module}/{half}": tensor for half, tensor in zip("AB", halves, strict=True)}
    header = json.dumps({"shape": list(tuning_pass.hidden.shape[:2]), "scaling": tuning_pass.scaling})
    return save({name: value.detach().float().contiguous() for name, value in tensors.items()}, {"pass": header})


def decode_pass(data: bytes, width: int) -> Pass:
    """The pass of these bytes, in float32. Raises SwarmError for what is none, or is not of this ``width``, and for
    numbers that ``check_states`` refuses."""
    try:
        header = header_of(data)
        fields = parse_as(_PassFields, parse_json(header.metadata.get("pass", "{}")))
    except ValueError as error:
        fault = str(error) if isinstance(error, ParseError) else type(error).__name__
        raise SwarmError(f"a message is no safetensors of a pass: {fault}") from error
    rows, tokens = fields.shape
    if rows * tokens > MOST_TOKENS:
        raise SwarmError(f"a pass of {rows * tokens} tokens; at most {MOST_TOKENS} are taken at once")
    for name, entry in header.tensors.items():
        if entry.dtype != "F32":
            raise SwarmError(f"{name[:40]} of a pass is in {entry.dtype}, not F32")
        expected_shape = (rows * tokens, width)
        if name in (HIDDEN, GRADIENT) and entry.shape != expected_shape:
            raise SwarmError(f"{name} of {list(entry.shape)} does not fit: the pass has {list(expected_shape)}")
        if name not in (HIDDEN, GRADIENT) and not (_HALF.fullmatch(name) and len(entry.shape) == 2):
            raise SwarmError(f"a pass holds {name[:40]!r}, which is neither hidden states nor a half of LoRA")
    if HIDDEN not in header.tensors:
        raise SwarmError("a pass holds no hidden states")
    tensors = load(data)
    for name, tensor in tensors.items():
        check_states(tensor, f"{name} of a pass holds")
    gradient = tensors.get(GRADIENT)
    return Pass(
        tensors[HIDDEN].unflatten(0, (rows, tokens)),
        _adapters(tensors),
        fields.scaling,
        None if gradient is None else gradient.unflatten(0, (rows, tokens)),
    )


def _adapters(tensors: Mapping[str, Tensor]) -> Adapters:
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _HALF.fullmatch(name):
            halves.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    for (layer, module), both in halves.items():
        if set(both) != {"A", "B"} or both["A"].shape[0] != both["B"].shape[1]:
            raise SwarmError(f"LoRA of {module} in layer {layer} is not two halves of one rank")
    return {key: (both["A"], both["B"]) for key, both in halves.items()}
