"""What a section of a profile asks of its model and data, checked before anything expensive begins.

A configuration lists its needs (``config.needs()``); an experiment holds them against a model's config.json and the
counts of its data, before it loads a weight. A test holds every profile against the true facts, pinned.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from firsttoken.assets.corpora import SPLITS, load_qa
from firsttoken.assets.models import model_config, model_name
from firsttoken.assets.positions import context_of
from firsttoken.study.errors import ProfileError
from firsttoken.study.machine import memory_bytes

LAYERS, CONTEXT, MEMORY = "layers", "tokens of context", "bytes of memory"
TEXT = "tokens of text"  # of a split: "tokens of text, train"; counted by who cuts the windows


@dataclass(frozen=True)
class Need:
    """``key`` of the profile asks for ``wanted`` of what ``of`` names: LAYERS, CONTEXT, or as the functions below."""

    key: str
    wanted: int
    of: str
    mend: str = "lower it"


def questions_of(source: str, split: str) -> str:
    """Name the questions of ``source`` as the subject of a need; ``ModelFacts`` counts them."""
    return f"{split} questions of {source}"


def text_of(split: str) -> str:
    """Name running text as the subject of a need: it is counted in tokens, those between passages included."""
    return f"{TEXT}, {split}"


class ModelFacts:
    """The facts of ``model``, as ``load_model`` names it, and of any questions, looked up when they are asked for.

    ``more`` are other facts by name. Raises ModelError and CorpusError as ``model_config`` and ``load_qa`` do.
    """

    def __init__(self, model: str, more: Mapping[str, int] | None = None) -> None:
        self._model, self._more = model, dict(more or {})

    def get(self, fact: str, /) -> int | None:
        """Return the number that ``fact`` names, None where it is not known."""
        if fact not in self._more and fact in (LAYERS, CONTEXT):
            config = model_config(self._model)
            self._more |= {LAYERS: config.num_hidden_layers, CONTEXT: context_of(config)}
        split, counted, source = fact.partition(" questions of ")
        if fact not in self._more and counted and split in SPLITS:
            self._more[fact] = len(load_qa(source, split))
        return self._more.get(fact)

    def __str__(self) -> str:
        return model_name(self._model)


def check(needs: Iterable[Need], facts: ModelFacts | Mapping[str, int], context: str = "") -> None:
    """Raise ProfileError for the first need that asks for more than ``facts`` have, naming its key and the mend.

    ``context`` is what lacks it, by default the model for what a model has. A need of what is not known is passed over.
    """
    for need in needs:
        value = facts.get(need.of)
        if value is not None and need.wanted > value:
            owner = context or (str(facts) if isinstance(facts, ModelFacts) and need.of in (LAYERS, CONTEXT) else "")
            fact = f"{need.of} of {owner}" if owner else need.of
            raise ProfileError(f"{need.key}: {need.wanted:,} {fact} are asked for, there are {value:,}; {need.mend}")


def weight_bytes(model: str, dtype: torch.dtype) -> int:
    """Bytes that the weights of ``model`` take in ``dtype``, from its config alone. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(model_config(model), dtype=dtype)
    return sum(parameter.nbytes for parameter in built.parameters())


def device_memory(device: torch.device) -> int:
    """Bytes of memory where ``device`` computes: the GPU's own, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_bytes()
