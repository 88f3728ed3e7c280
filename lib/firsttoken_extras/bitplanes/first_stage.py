"""A model as its first stage would make it, in memory: what a start in planes answers with, and what its bytes are.

Here, and not in a checkpoint, layers may wait too, and the embedding and the head be cut otherwise: for the frontier of
quality against bytes (``firsttoken_studies.nb17_bits_before_layers.frontier``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.passlayer import pass_layers, restore_layers
from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes.codec import encode
from firsttoken_extras.bitplanes.encode import STORED, plane_encoder
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of

SPELLED = "SPLIT[, FIRST:END later][, ends SPLIT]"
_PLAN = re.compile(r"(?P<split>[^,]+)(, (?P<first>\d{1,5}):(?P<end>\d{1,5}) later)?(, ends (?P<ends>[^,]+))?")


@dataclass(frozen=True)
class PlanSpec:
    """A plan of the bits and layers that come first: layers are cut by ``split``, the embedding and the head by
    ``ends`` ("": alike), and the layers ``waiting`` (0-based) come later.

    Raises StageError for a split that does not exist.
    """

    split: str
    waiting: range = range(0)
    ends: str = ""

    def __post_init__(self) -> None:
        for name in (self.split, self.ends or self.split):
            if name not in SPLITS:
                raise StageError(f"no split of weights is called {name!r}: choose one of {', '.join(SPLITS)}")

    @classmethod
    def parse(cls, text: str) -> PlanSpec:
        """The plan that ``text`` names, as SPELLED. Raises StageError, also for a range without layers."""
        if (match := _PLAN.fullmatch(text)) is None:
            raise StageError(f"{text!r} is no plan: write {SPELLED}")
        waiting = range(int(match["first"] or 0), int(match["end"] or 0))
        if match["end"] and not waiting:
            raise StageError(
                f"{waiting.start}:{waiting.stop} holds no layers: name the first, and the one after the last"
            )
        return cls(match["split"], waiting, match["ends"] or "")

    def split_of(self, layer: int | None) -> str:
        """Return the split by which the matrices of ``layer`` are cut; None is what is of no layer."""
        return self.ends or self.split if layer is None else self.split

    @property
    def exact(self) -> bool:
        """Return whether the first stage is the whole model, bit by bit."""
        return not self.waiting and planes_of(self.split) == planes_of(self.split_of(None)) == 1

    def check(self, depth: int) -> None:
        """Raise StageError for layers that a model of ``depth`` does not have, and when all of them wait."""
        if self.waiting.stop > depth:
            raise StageError(
                f"the plan names the layers {self.waiting.start}:{self.waiting.stop}, of a model with 0:{depth}"
            )
        if len(self.waiting) == depth:
            raise StageError(f"the plan leaves all {depth} layers for later: the first stage needs at least one")


@dataclass(frozen=True)
class Bytes:
    """The bytes of a model's or a layer's weights: as stored, in the first plane, in all planes; streams are coded."""

    plain: int = 0
    first: int = 0
    planes: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.plain + other.plain, self.first + other.first, self.planes + other.planes)


def layer_bytes(model: PreTrainedModel, plan_spec: PlanSpec, dtype: str) -> dict[int | None, Bytes]:
    """Return the bytes of the layers of ``model`` in planes of ``dtype`` ("BF16"), and, under None, of what is of no
    layer.

    Vectors travel whole with the first. That a layer waits is not looked at.
    """
    bytes_by_layer: dict[int | None, Bytes] = {}
    for name, parameter in model.named_parameters():
        layer = layer_of(name)
        split, plain = plan_spec.split_of(layer), 2 * parameter.numel()
        sizes = [plain]
        if parameter.dim() > 1:
            words = parameter.data.to("cpu", STORED[dtype]).contiguous().view(-1).view(torch.int16)
            made = plane_encoder(split, dtype)
            planes = (made.cut(words, plane) for plane in range(planes_of(split)))
            sizes = [sum(len(encode(stream.numpy().tobytes())[1]) for stream in streams) for streams in planes]
        bytes_by_layer[layer] = bytes_by_layer.get(layer, Bytes()) + Bytes(plain, sizes[0], sum(sizes))
    return bytes_by_layer


def coded_bytes(model: PreTrainedModel, plan_spec: PlanSpec, dtype: str) -> Bytes:
    """Return the bytes of ``model``, of which the first stage brings the first planes of the layers that do not
    wait."""
    by_layer = layer_bytes(model, plan_spec, dtype)
    first = sum(size.first for layer, size in by_layer.items() if layer not in plan_spec.waiting)
    return Bytes(sum(size.plain for size in by_layer.values()), first, sum(size.planes for size in by_layer.values()))


@contextmanager
def coarse(model: PreTrainedModel, plan_spec: PlanSpec, dtype: str) -> Iterator[PreTrainedModel]:
    """``model`` as the first stage of its weights in ``dtype`` makes it, vectors whole; as it was after it.

    Raises StageError for layers that the model does not have.
    """
    exact = {parameter: parameter.data for parameter in model.parameters()}
    removed = pass_layers(model, plan_spec.waiting)
    try:
        for name, parameter in model.named_parameters():
            data, split = parameter.data, plan_spec.split_of(layer_of(name))
            words = data.to(STORED[dtype]).contiguous().view(-1).view(torch.int16)
            if parameter.dim() > 1 and planes_of(split) > 1:  # one plane is the word itself
                made = plane_encoder(split, dtype)
                words = made.first(made.cut(words, 0), len(words))
            parameter.data = words.view(STORED[dtype]).view(data.shape).to(data.dtype)
        yield model
    finally:
        restore_layers(model, removed)
        for parameter, data in exact.items():
            parameter.data = data
