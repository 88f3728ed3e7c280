"""The three files of an adapter, as far as they are used: which layers it heals, of which base, how strongly, and by
what (no torch, no PEFT)."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from firsttoken.assets.adapter_config import MEND, LoraConfig, lora_config
from firsttoken.study.errors import StageError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_bytes, shown
from firsttoken.study.parsing.safetensors_header import TensorEntry, header_of
from firsttoken.study.parsing.schema import at_least, digits, parse_as

CONFIG, WEIGHTS, RECIPE = "adapter_config.json", "adapter_model.safetensors", "recipe.json"
Kind = TypeVar("Kind")
HalvesByLayer = dict[int, dict[str, tuple[np.ndarray, np.ndarray]]]
"""Layer (0-based) -> module in it ("self_attn.q_proj") -> A [rank, in] and B [out, rank] in float32, B scaled."""

_NAME = re.compile(r"^base_model\.model\.(model\.layers\.(0|[1-9]\d{0,5})\.([\w.]{1,64}))\.lora_([AB])\.weight$")
MOST_BYTES = 4 * 2**30  # of an adapter's weights
_NUMBERS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True)
class Training:
    """The rank and alpha of the training, as the recipe has them; its other fields are for readers."""

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


def lora_halves(config: LoraConfig, weights: bytes) -> HalvesByLayer:
    """Read the LoRA halves of a safetensors file, named as PEFT names them, by layer.

    Raises ParseError for a file that is not whole, a name, a rank or a dtype that no layer takes, a module that the
    configuration does not name (PEFT would drop it without a word), a half that is missing, and numbers that are not
    finite.
    """
    try:
        header = header_of(weights)
    except ValueError as error:  # ParseError is one
        raise ParseError(f"its weights are not whole ({error})") from error
    halves = defaultdict[str, dict[str, np.ndarray]](dict)  # by module
    positions: dict[str, tuple[int, str]] = {}
    for key, entry in header.tensors.items():
        match = _NAME.match(key)
        module = match[1] if match else ""
        rank = config.rank(module)
        if not match or len(entry.shape) != 2 or entry.shape["AB".index(match[4])] != rank:
            raise ParseError(f"holds {shown(key, 100)} {list(entry.shape)}, which no layer takes at rank {rank}")
        if module not in positions and not config.targets(module):
            raise ParseError(f"holds {shown(key, 100)}, which the target_modules of its {CONFIG} do not name")
        positions[module] = int(match[2]), match[3]
        halves[module][match[4]] = _numbers(key, entry, weights)
    layers: HalvesByLayer = {}
    for module, (layer, path) in positions.items():
        pair = halves[module]
        if pair.keys() != {"A", "B"}:
            raise ParseError(f"{path} of layer {layer} lacks one half of a pair")
        with np.errstate(over="ignore"):
            a, b = pair["A"], pair["B"] * np.float32(config.scale(module))
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ParseError(f"{path} of layer {layer} holds numbers that are not finite, or overflow when scaled")
        layers.setdefault(layer, {})[path] = a, b
    return layers


def _numbers(key: str, entry: TensorEntry, weights: bytes) -> np.ndarray:
    """The tensor of ``entry`` in float32, in memory of its own."""
    if entry.dtype not in _NUMBERS:
        raise ParseError(
            f"holds {shown(key, 100)} as {entry.dtype}, and only numbers in {', '.join(_NUMBERS)} are read"
        )
    stored = np.frombuffer(weights[entry.start : entry.end], _NUMBERS[entry.dtype]).reshape(entry.shape)
    if entry.dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return stored.astype(np.float32)


def read_adapter(folder: Path) -> tuple[MadeFrom, LoraConfig]:
    """Read the origin and the configuration of the adapter in ``folder``.

    Raises StageError for a file that is missing or damaged, and where the two say different things.
    """
    made = made_from(folder, MadeFrom)
    with errors_as(folder / CONFIG, StageError, MEND):
        config = lora_config(read_bytes(folder / CONFIG))
        recipe_sizes = made.recipe and (made.recipe.rank, made.recipe.alpha)
        if recipe_sizes and recipe_sizes != (config.r, config.lora_alpha):
            raise ParseError(
                f"its rank {config.r} and alpha {config.lora_alpha:g} are not the "
                f"{recipe_sizes[0]} and {recipe_sizes[1]:g} of {RECIPE}"
            )
    return made, config


def check_plain(folder: Path, name: str) -> None:
    """Raise StageError, for ``name``, unless the adapter in ``folder`` is plain LoRA that is whole, whoever attaches
    it then."""
    with errors_as(name, StageError, MEND):
        lora_halves(lora_config(read_bytes(folder / CONFIG, 2**20)), read_bytes(folder / WEIGHTS, MOST_BYTES))


def made_from(folder: Path, kind: type[Kind]) -> Kind:
    """Read the part of an adapter's recipe that decides where it fits, as ``kind``. Raises StageError."""
    content = read_recipe(folder)
    with errors_as(folder / RECIPE, StageError, "it is of another tool; train it here or check it out"):
        return parse_as(kind, content, others=True)


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe.json of an adapter. Raises StageError when the folder is no adapter of this project."""
    with errors_as(folder / RECIPE, StageError, "train it (firsttoken measure healing_training), or check it out"):
        content = read_json(folder / RECIPE)
        if not isinstance(content, dict):
            raise ParseError("it is no mapping")
        return content
