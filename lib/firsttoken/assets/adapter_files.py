"""The three files of an adapter, as far as they are used: which layers it heals, of which base, and how strongly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from firsttoken.study.errors import StageError
from firsttoken.study.parsing.json_text import parse_json, read_json
from firsttoken.study.parsing.parse_errors import Damaged, blaming, read_bytes
from firsttoken.study.parsing.schema import at_least, between, digits, shaped

CONFIG, WEIGHTS, RECIPE = "adapter_config.json", "adapter_model.safetensors", "recipe.json"
Kind = TypeVar("Kind")
_MEND = "copy it again"
_UNSUPPORTED = ("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")


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
