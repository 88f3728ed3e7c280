"""The halves of LoRA in a stock PEFT file, by layer and module, as numpy's arrays (no torch, no PEFT)."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from firsttoken.assets.adapter_files import LoraConfig
from firsttoken.study.parsing.parse_errors import Damaged, shown
from firsttoken.study.parsing.safetensors_header import TensorEntry, header_of

HalvesByLayer = dict[int, dict[str, tuple[np.ndarray, np.ndarray]]]
"""Layer (0-based) -> module in it ("self_attn.q_proj") -> A [rank, in] and B [out, rank] in float32, B scaled."""

_NAME = re.compile(r"^base_model\.model\.model\.layers\.(0|[1-9]\d{0,5})\.(.+)\.lora_([AB])\.weight$")
_NUMBERS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def lora_halves(config: LoraConfig, weights: bytes) -> HalvesByLayer:
    """What a safetensors file holds, named as PEFT names it.

    Raises Damaged for a file that is not whole, a name, a rank or a dtype that no layer takes, a half that is missing,
    and numbers that are not finite.
    """
    try:
        header = header_of(weights)
    except ValueError as error:  # Damaged is one
        raise Damaged(f"its weights are not whole ({error})") from error
    halves = defaultdict[tuple[int, str], dict[str, np.ndarray]](dict)  # by layer and module
    for key, entry in header.tensors.items():
        found = _NAME.match(key)
        if not found or len(entry.shape) != 2 or entry.shape["AB".index(found[3])] != config.r:
            raise Damaged(f"holds {shown(key, 100)} {list(entry.shape)}, which no layer takes at rank {config.r}")
        halves[int(found[1]), found[2]][found[3]] = _numbers(key, entry, weights)
    layers: HalvesByLayer = {}
    for (layer, path), pair in halves.items():
        if pair.keys() != {"A", "B"}:
            raise Damaged(f"{path} of layer {layer} lacks one half of a pair")
        with np.errstate(over="ignore"):
            a, b = pair["A"], pair["B"] * np.float32(config.scale)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise Damaged(f"{path} of layer {layer} holds numbers that are not finite, or overflow when scaled")
        layers.setdefault(layer, {})[path] = a, b
    return layers


def _numbers(key: str, entry: TensorEntry, weights: bytes) -> np.ndarray:
    """The tensor of ``entry`` in float32, in memory of its own."""
    if entry.dtype not in _NUMBERS:
        raise Damaged(f"holds {shown(key, 100)} as {entry.dtype}, and only numbers in {', '.join(_NUMBERS)} are read")
    stored = np.frombuffer(weights[entry.start : entry.end], _NUMBERS[entry.dtype]).reshape(entry.shape)
    if entry.dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return stored.astype(np.float32)
