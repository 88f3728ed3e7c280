"""A model as its first stage makes it, in memory: what a start in planes answers with, and what its bytes are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.passlayer import pass_layers, restore_layers
from firsttoken_extras.bitplanes.codec import encode
from firsttoken_extras.bitplanes.encode import STORED, plane_encoder
from firsttoken_extras.bitplanes.layouts import planes_of
from firsttoken_extras.bitplanes.plan_spec import UNCUT, PlanSpec


@dataclass(frozen=True)
class Bytes:
    """The bytes of a model's or a layer's weights: as stored, in the first plane, in all planes; streams are coded."""

    plain: int = 0
    first: int = 0
    planes: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.plain + other.plain, self.first + other.first, self.planes + other.planes)


def layer_bytes(model: PreTrainedModel, plan_spec: PlanSpec, dtype: str) -> dict[int | None, Bytes]:
    """What the layers of ``model`` weigh in planes of ``dtype`` ("BF16"), and, under None, what is of no layer.

    Vectors travel whole with the first. That a layer waits is not looked at.
    """
    found: dict[int | None, Bytes] = {}
    for name, parameter in model.named_parameters():
        layer = layer_of(name)
        split, plain = plan_spec.split_of(layer), 2 * parameter.numel()
        sizes = [plain]
        if parameter.dim() > 1 and split != UNCUT:
            words = parameter.data.to("cpu", STORED[dtype]).contiguous().view(-1).view(torch.int16)
            made = plane_encoder(split, dtype)
            planes = (made.cut(words, plane) for plane in range(planes_of(split)))
            sizes = [sum(len(encode(stream.numpy().tobytes())[1]) for stream in streams) for streams in planes]
        found[layer] = found.get(layer, Bytes()) + Bytes(plain, sizes[0], sum(sizes))
    return found


def coded_bytes(model: PreTrainedModel, plan_spec: PlanSpec, dtype: str) -> Bytes:
    """What ``model`` weighs, of which the first stage brings the first planes of the layers that do not wait."""
    each = layer_bytes(model, plan_spec, dtype)
    first = sum(size.first for layer, size in each.items() if layer not in plan_spec.waiting)
    return Bytes(sum(size.plain for size in each.values()), first, sum(size.planes for size in each.values()))


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
            if parameter.dim() > 1 and split != UNCUT:
                made = plane_encoder(split, dtype)
                words = made.first(made.cut(words, 0), len(words))
            parameter.data = words.view(STORED[dtype]).view(data.shape).to(data.dtype)
        yield model
    finally:
        restore_layers(model, removed)
        for parameter, data in exact.items():
            parameter.data = data
