"""adapter_config.json of PEFT: the keys that say what a LoRA adapter computes, and those that say nothing of it.

PEFT has had some forty keys since its version 0.5, and adds a few with each. What is not listed here may change the
answer, so it is refused by name unless it is empty (no torch, no PEFT).
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError, shown
from firsttoken.study.parsing.schema import between, parse_as

MEND = "copy it again, or train a plain one"

_SILENT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version"),  # where it comes from
        *("inference_mode", "lora_dropout", "merge_weights", "runtime_config"),  # how it is trained or loaded
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # details of a kind of init_lora_weights
        *("fan_in_fan_out", "megatron_core", "qalora_group_size"),  # no part of an nn.Linear without another key
    }
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "task_type": (None, "CAUSAL_LM"),  # the others put a head of their own on the model
    # pissa, olora, corda, lora_ga and loftq take something off the base's weights, also when an adapter is loaded
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Keys of which some values leave plain LoRA as it is, with these values; an absent one is the default."""

_ALL_LINEAR = "all-linear"
_MOST_REPEATS = 5  # of a pattern: each more makes the worst search some ten times longer
_Rank = Annotated[int, between(1, 4096)]
_Alpha = Annotated[float, between(1e-3, 1e5)]  # the strongest published alpha is 64 times its rank
_Names = str | tuple[str, ...] | None


@dataclass(frozen=True)
class LoraConfig:
    """The part of PEFT's configuration that decides the arithmetic, under PEFT's names and with its meanings.

    A module is named as the base model names it: "model.layers.0.self_attn.q_proj".
    """

    r: _Rank
    lora_alpha: _Alpha
    target_modules: _Names = None
    exclude_modules: _Names = None
    layers_to_transform: int | tuple[int, ...] | None = None
    layers_pattern: _Names = None
    use_rslora: bool | None = False
    rank_pattern: dict[str, _Rank] | None = field(default_factory=dict)
    alpha_pattern: dict[str, _Alpha] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.target_modules is None:
            raise ParseError("its target_modules name no module")
        by_layer = self.layers_to_transform not in (None, ())
        if by_layer and isinstance(self.target_modules, str):
            raise ParseError("layers_to_transform: PEFT takes it with a list of target_modules only")
        if self.layers_pattern and not by_layer:
            raise ParseError("layers_pattern: PEFT takes it with layers_to_transform only")
        texts = [text for text in (self.target_modules, self.exclude_modules) if isinstance(text, str)]
        for text in (*texts, *self._layers_patterns, *(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            _check_pattern(text)

    @property
    def _layers_patterns(self) -> tuple[str, ...]:
        return (self.layers_pattern,) if isinstance(self.layers_pattern, str) else self.layers_pattern or ()

    def rank(self, module: str) -> int:
        """The rank of the halves on ``module``."""
        patterns = self.rank_pattern or {}
        return patterns.get(_first(patterns, module), self.r)

    def scale(self, module: str) -> float:
        """Return the factor on the product of both halves on ``module``."""
        patterns = self.alpha_pattern or {}
        alpha, rank = patterns.get(_first(patterns, module), self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return whether PEFT puts halves on the linear ``module`` of a decoder's layer."""
        if self.exclude_modules and _named(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules.lower() == _ALL_LINEAR or _named(self.target_modules, module)
        layers, names = self.layers_to_transform, self.target_modules or ()
        if module in names or layers in (None, ()) or not _named(names, module):
            return _named(names, module)
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self._layers_patterns if pattern]
        numbers = (re.match(pattern, module) for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."])
        number = next((int(match[1]) for match in numbers if match), None)
        return number == layers if isinstance(layers, int) else number in layers


def lora_config(content: bytes) -> LoraConfig:
    """The configuration in the bytes of an adapter_config.json.

    Raises ParseError and other ValueErrors, also for what is not known to be computed here as PEFT computes it.
    """
    options = parse_json(content)
    if not isinstance(options, dict):
        raise ParseError("it is no mapping")
    for key, values in _VALUES.items():
        value = options.get(key, values[0] if key != "peft_type" else None)
        if not any(type(value) is type(plain) and value == plain for plain in values):
            raise ParseError(f"its {key} {shown(value)} is none of plain LoRA")
    computed = LoraConfig.__dataclass_fields__.keys()
    for key in sorted(options.keys() - computed - _SILENT - _VALUES.keys()):
        if not (options[key] is None or options[key] is False or options[key] in ("", [], {})):
            raise ParseError(f"its {shown(key)} {shown(options[key])} is none of plain LoRA")
    return parse_as(LoraConfig, {key: options[key] for key in computed & options.keys()})


def _named(names: str | Iterable[str], module: str) -> bool:
    """Return whether ``module`` is one of ``names`` or ends in one, or fits the pattern that they are."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first(patterns: Iterable[str], module: str) -> str:
    """The first of ``patterns`` that the end of ``module`` fits; "" where none does."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), "")


def _check_pattern(text: str) -> None:
    """Raise ParseError for a regular expression that is none, or that could take long to search a name for."""
    try:
        re.compile(text)
    except re.error as error:
        raise ParseError(f"{shown(text)} is no pattern ({error})") from error
    if re.search(r"(?<!\\)\)[*+{]", text) or len(re.findall(r"[*+{]", text)) > _MOST_REPEATS:
        raise ParseError(f"the pattern {shown(text)} could take long to search for; list the modules instead")
