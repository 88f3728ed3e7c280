"""The three files of an adapter, as far as they are used: which layers it heals, of which base, how strongly, and by
what (no torch, no PEFT)."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from firsttoken.study.errors import StageError
from firsttoken.study.parsing.json_text import parse_json, read_json
from firsttoken.study.parsing.parse_errors import Damaged, blaming, read_bytes, shown
from firsttoken.study.parsing.safetensors_header import TensorEntry, header_of
from firsttoken.study.parsing.schema import at_least, between, digits, shaped

CONFIG, WEIGHTS, RECIPE = "adapter_config.json", "adapter_model.safetensors", "recipe.json"
Kind = TypeVar("Kind")
_MEND = "copy it again"
_UNSUPPORTED = ("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")


HalvesByLayer = dict[int, dict[str, tuple[np.ndarray, np.ndarray]]]
"""Layer (0-based) -> module in it ("self_attn.q_proj") -> A [rank, in] and B [out, rank] in float32, B scaled."""

_NAME = re.compile(r"^base_model\.model\.model\.layers\.(0|[1-9]\d{0,5})\.(.+)\.lora_([AB])\.weight$")
_NUMBERS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True)
class LoraConfig:
    """What of PEFT's configuration makes the arithmetic; the strongest published alpha is 64 times its rank."""

    r: Annotated[int, between(1, 4096)]
    lora_alpha: Annotated[float, between(1e-3, 1e5)]
    peft_type: str | None
    bias: str = "none"

    @property
    def scale(self) -> float:
        """What the product of both halves is multiplied by."""
        return self.lora_alpha / self.r


@dataclass(frozen=True)
class Training:
    """What the recipe says of the training; more than this is for readers."""

    rank: int
    alpha: float


@dataclass(frozen=True)
class MadeFrom:
    """recipe.json: the layers that were there, the sha256 of the base, and the training where this project did it."""

    layers: tuple[Annotated[int, at_least(0)], ...]
    base_sha256: Annotated[str, digits(64)]
    recipe: Training | None = None


@dataclass(frozen=True)
class TunedFrom:
    """recipe.json of an adapter that makes another model of a base: the base's sha256, and what it was tuned to."""

    base_sha256: Annotated[str, digits(64)]
    tasks: tuple[str, ...]


def lora_config(content: bytes) -> LoraConfig:
    """The configuration in the bytes of an adapter_config.json. Raises Damaged and other ValueErrors."""
    options = parse_json(content)
    config = shaped(LoraConfig, options, others=True)
    odd = [key for key in _UNSUPPORTED if options.get(key)]
    if odd or config.peft_type != "LORA" or config.bias != "none":
        raise Damaged(f"it is not plain LoRA ({', '.join(odd) or 'type or bias'}); train a plain one")
    return config


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


def read_adapter(folder: Path) -> tuple[MadeFrom, LoraConfig]:
    """What the adapter in ``folder`` was made from, and its configuration.

    Raises StageError for a file that is missing or damaged, and where the two say different things.
    """
    made = made_from(folder, MadeFrom)
    with blaming(folder / CONFIG, StageError, _MEND):
        config = lora_config(read_bytes(folder / CONFIG))
        said = made.recipe and (made.recipe.rank, made.recipe.alpha)
        if said and said != (config.r, config.lora_alpha):
            raise Damaged(
                f"its rank {config.r} and alpha {config.lora_alpha:g} are not the {said[0]} and {said[1]:g} of {RECIPE}"
            )
    return made, config


def made_from(folder: Path, kind: type[Kind]) -> Kind:
    """What of an adapter's recipe decides where it fits, as ``kind``. Raises StageError."""
    content = read_recipe(folder)
    with blaming(folder / RECIPE, StageError, "it is of another tool; train it here or check it out"):
        return shaped(kind, content, others=True)


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe.json of an adapter. Raises StageError when the folder is no adapter of this project."""
    with blaming(folder / RECIPE, StageError, "train it or check it out"):
        content = read_json(folder / RECIPE)
        if not isinstance(content, dict):
            raise Damaged("it is no mapping")
        return content
