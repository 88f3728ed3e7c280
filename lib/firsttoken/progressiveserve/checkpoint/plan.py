"""The order in which the tensors of a model are brought: stages of parts, one part a file.

Generalises the three stages of ProgressiveServe (2.5.3) to any grouping of layers, and to parts that bring a tensor
coarsely first and exactly later. Indices are 0-based; stages count from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from firsttoken.progressiveserve.checkpoint.names import DTYPES, EMBEDDING, HEAD, NORM, layer_of
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import StageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig


class Origin(NamedTuple):
    """The origin of the weights; ``sha256`` is None only for random ones, which ``source`` names with their seed."""

    source: str
    sha256: str | None
    kind: Literal["real", "random"]


class TensorSource(Protocol):
    """Tensors by name, one at a time; a tied head is not among them.

    ``names`` are in the order in which a forward pass needs them, ``shapes`` and ``dtype`` are known without reading.
    """

    names: list[str]
    shapes: dict[str, tuple[int, ...]]
    config: PretrainedConfig
    provenance: Origin

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensor ``name``."""

    def get(self, name: str) -> Tensor:
        """The tensor, on any device. Raises ModelError for one that is not :func:`finite`."""

    def write_side_files(self, folder: Path) -> None:
        """Write config.json, and where they exist generation_config.json and the tokenizer's files."""


class PlannedCoding(Protocol):
    """A dataclass that says in which format a part brings its tensors, but for those of ``whole``; it writes them."""

    format: str
    whole: tuple[str, ...]

    def fault(self, action: str, before: PlannedCoding | None) -> str:
        """Return what is wrong with bringing a tensor so by ``action`` after it was brought as ``before`` says; "" if
        nothing. ``before`` is None where it has not come, or has come as it is."""

    def lacking(self) -> str:
        """Return what is still missing of a tensor that this brings last; "" if nothing."""

    def most_bytes(self, source: TensorSource, part: Part) -> int:
        """The most bytes of the file's tensors. Raises StageError for tensors that the format does not know."""

    def encoded(self, source: TensorSource, part: Part) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The file's tensors by name, and what the manifest says of them (``PartFile.content``). Raises StageError."""


@dataclass(frozen=True)
class Part:
    """Tensors that travel in one file.

    ``action`` "add" brings tensors for the first time, "refine" overwrites in place ones that are there. ``dtype``, in
    safetensors' words ("F8_E5M2"), rounds them on the way; None keeps what the source has. With a ``coding`` they
    travel in its format, and "refine" refines what is there by them.
    """

    name: str
    tensors: tuple[str, ...]
    layer: int | None = None
    action: str = "add"
    dtype: str | None = None
    coding: PlannedCoding | None = None

    def coding_of(self, tensor: str) -> PlannedCoding | None:
        """The coding in which the part brings ``tensor``; None where it travels as it is."""
        return None if self.coding is None or tensor in self.coding.whole else self.coding


@dataclass(frozen=True)
class Stage:
    """Parts in the order in which they are read."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class LoadPlan:
    """Stages in the order in which they are served."""

    stages: tuple[Stage, ...]

    def layers(self, stage: int) -> tuple[int, ...]:
        """The layers that compute as of ``stage`` (1-based), sorted."""
        parts = (part for brought in self.stages[:stage] for part in brought.parts)
        return tuple(sorted({part.layer for part in parts if part.layer is not None}))

    def check(self, names: Sequence[str]) -> None:
        """Raise StageError unless the plan brings every one of ``names``, each once, and exactly in the end.

        A layer must come within one stage, and what is of no layer with the first: a stage computes with them.
        """
        wanted = set(names)
        if not self.stages:
            raise StageError("the plan has no stages: give it one group of layers or more")
        brought: dict[str, tuple[str, Part]] = {}
        since: dict[int | None, int] = {None: 1}
        for number, stage in enumerate(self.stages, start=1):
            if not stage.parts or not all(part.tensors for part in stage.parts):
                raise StageError(f"stage {stage.name} or a part of it is empty: leave it out, or give it layers")
            for part in stage.parts:
                if part.action not in ("add", "refine") or part.dtype not in (None, *DTYPES):
                    raise StageError(
                        f"part {part.name} of stage {stage.name} has the action {part.action!r} and the dtype "
                        f"{part.dtype!r}: choose add or refine, and one of {', '.join(DTYPES)}"
                    )
                for tensor in part.tensors:
                    if tensor not in wanted:
                        raise StageError(f"stage {stage.name} brings {tensor}, which the model does not have")
                    if layer_of(tensor) != part.layer:
                        raise StageError(f"part {part.name} of stage {stage.name} brings {tensor} of another layer")
                    if part.action == "add" and tensor in brought:
                        raise StageError(
                            f"overlap: {_label(tensor)} is brought in stage {brought[tensor][0]} and again in stage "
                            f"{stage.name}; name it once"
                        )
                    if part.action == "add" and since.setdefault(part.layer, number) != number:
                        raise StageError(
                            f"{_label(tensor)} comes in stage {stage.name}, and is needed as of stage "
                            f"{self.stages[since[part.layer] - 1].name}; bring them together"
                        )
                    if part.action == "refine" and tensor not in brought:
                        raise StageError(
                            f"stage {stage.name} refines {_label(tensor)} before a stage has brought it; add it first"
                        )
                    if fault := _coding_fault(part, tensor, brought[tensor][1] if tensor in brought else None):
                        raise StageError(f"stage {stage.name}: {_label(tensor)} {fault}")
                    if part.action == "refine" and not (part.coding or brought[tensor][1].dtype):
                        raise StageError(
                            f"stage {stage.name} brings {_label(tensor)} again, which is exact; leave it out"
                        )
                    brought[tensor] = (stage.name, part)
        if hole := next((name for name in names if name not in brought), None):
            raise StageError(f"hole: {_label(hole)} is in no stage; name it in one")
        if coarse := next((name for name, (_, part) in brought.items() if part.dtype), None):
            raise StageError(f"{_label(coarse)} stays {brought[coarse][1].dtype}: add a part that refines it")
        for name, (_, part) in brought.items():
            if (coding := part.coding_of(name)) and (lacking := coding.lacking()):
                raise StageError(f"{_label(name)} lacks {lacking}: name them in a later stage")


def _coding_fault(part: Part, tensor: str, before: Part | None) -> str:
    """Return what is wrong with the format in which ``part`` brings ``tensor`` after ``before``; "" if nothing."""
    coding, earlier = part.coding_of(tensor), before.coding_of(tensor) if before else None
    if coding is None:
        return f"came in {earlier.format} and comes again whole; bring the rest of it" if earlier else ""
    if part.dtype:
        return f"is rounded and comes in {coding.format}; choose one"
    return coding.fault(part.action, earlier)


def by_layers(names: Sequence[str], groups: Sequence[Sequence[int]]) -> LoadPlan:
    """Stage k brings the layers of group k; the first also the embedding, and the final norm and the head at its end.

    ``names`` are the tensors of a Llama-like model, with or without lm_head.weight. Stages are called A, B, C, ...
    Raises StageError when groups overlap, leave a hole, are empty, or name a layer that the model does not have.
    """
    layers: dict[int, list[str]] = {}
    for name in names:
        if (layer := layer_of(name)) is not None:
            layers.setdefault(layer, []).append(name)
        elif name not in (EMBEDDING, NORM, HEAD):
            raise StageError(f"{name} is no tensor of a Llama-like model: use one (Llama, Qwen2, ...)")
    digits = max(2, len(str(max(layers, default=0))))
    stages = []
    for k, group in enumerate(groups):
        stage = chr(ord("A") + k % 26) * (k // 26 + 1)
        if not group:
            raise StageError(f"stage {stage} has no layers: leave it out, or remove a larger block")
        if unknown_layers := sorted(set(group) - layers.keys()):
            raise StageError(f"stage {stage} names layer {unknown_layers[0]}: the model has {len(layers)}, from 0")
        parts = [Part(f"layer {i:0{digits}}", tuple(layers[i]), i) for i in sorted(group)]
        if k == 0:
            head = tuple(name for name in (NORM, HEAD) if name in names)
            parts = [Part("embedding", (EMBEDDING,)), *parts, Part("head", head)]
        stages.append(Stage(stage, tuple(parts)))
    plan = LoadPlan(tuple(stages))
    plan.check(names)
    return plan


def staged(names: Sequence[str], plan: StagePlan) -> LoadPlan:
    """The report's stages: A with what is not a layer, then B, then C. Raises StageError as :func:`by_layers` does."""
    return by_layers(names, [plan.a, plan.b, plan.c])


def single_stage(names: Sequence[str], depth: int) -> LoadPlan:
    """Everything in one stage: what a start without stages reads."""
    return by_layers(names, [range(depth)])


def _label(tensor: str) -> str:
    layer = layer_of(tensor)
    return tensor if layer is None else f"layer {layer} ({tensor})"
