"""Hidden states in 8 bits on the wire: integers and one scale for each block of a token's row (PETALS, section 3.1).

The blocks never reach beyond a token: what a token becomes must not depend on who shares its batch, or a chain that
is rebuilt after a fault, from prefills instead of steps, would give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firsttoken.study.errors import SwarmError

BLOCK = 64  # values a scale: 1.0625 bytes a value, 0.53 of fp16
_LARGEST = 127
_PARTS = {"codes": torch.int8, "scales": torch.float32, "block": torch.int32}


def pack(hidden: Tensor, block: int = BLOCK) -> dict[str, Tensor]:
    """``hidden`` [..., hidden] as codes [..., hidden] int8, scales [..., blocks] float32 and block [1] int32.

    No value is off by more than half a step: the largest magnitude of its block over 254. Raises SwarmError for values
    that are not finite, and a block below 1.
    """
    if block < 1:
        raise SwarmError(f"a block of hidden states holds at least 1 value, not {block}")
    if not torch.isfinite(hidden).all():
        raise SwarmError("hidden states hold NaN or infinity: the server before this one is at fault")
    width = hidden.shape[-1]
    rows = _in_blocks(hidden.detach().float(), block)
    scales = rows.abs().amax(-1) / _LARGEST
    steps = torch.where(scales > 0, scales, 1.0)
    codes = (rows / steps[..., None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    flat = codes.flatten(-2)[..., :width].contiguous()
    return {"codes": flat, "scales": scales, "block": torch.tensor([block], dtype=torch.int32)}


def unpack(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The hidden states [..., hidden] of ``pack``, in ``dtype``.

    Raises SwarmError for parts that are missing, of another type, do not fit each other, or too large for ``dtype``.
    """
    if set(tensors) != set(_PARTS):
        raise SwarmError(f"packed hidden states are {', '.join(_PARTS)}, not {', '.join(sorted(tensors)) or 'nothing'}")
    for name, wanted in _PARTS.items():
        if tensors[name].dtype is not wanted:
            raise SwarmError(f"packed hidden states: {name} must be {wanted}, not {tensors[name].dtype}")
    codes, scales = tensors["codes"], tensors["scales"]
    block = int(tensors["block"][0]) if tensors["block"].shape == (1,) else 0
    width = codes.shape[-1] if codes.ndim else 0
    if block < 1 or codes.ndim < 1 or scales.shape != (*codes.shape[:-1], -(-width // block)):
        shapes = f"scales {list(scales.shape)} do not fit codes {list(codes.shape)}"
        raise SwarmError(f"packed hidden states: {shapes} in blocks of {block}")
    # Multiplied in float32 and rounded once: bfloat16 codes would lose an eighth bit.
    values = (codes.float() * scales.repeat_interleave(min(block, width), -1)[..., :width]).to(dtype)
    if not torch.isfinite(values).all() or (scales < 0).any():
        raise SwarmError(f"packed hidden states: a scale is negative, NaN, or beyond what {dtype} holds")
    return values


def packed_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of packed hidden states, without the header of their message."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """``values`` [..., width] as [..., blocks, block], the last one filled up with zeros."""
    short = -values.shape[-1] % block
    return torch.nn.functional.pad(values, (0, short)).unflatten(-1, (-1, block))
