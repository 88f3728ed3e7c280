"""A model as its first planes make it, in memory: what a start in planes answers with, and what its bytes are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from firsttoken.progressive.planes.codec import encode
from firsttoken.progressive.planes.cutting import cutter
from firsttoken.progressive.planes.layouts import planes_of

STORED = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Bytes:
    """Of the weights of a model: as they are stored, in the first plane, and in all planes; streams coded."""

    plain: int
    first: int
    planes: int


def coded_bytes(model: PreTrainedModel, split: str, dtype: str) -> Bytes:
    """What ``model`` weighs in planes of ``dtype`` ("BF16"); vectors travel whole with the first."""
    made, plain, first, planes = cutter(split, dtype), 0, 0, 0
    for parameter in model.parameters():
        weights = parameter.data.to("cpu", STORED[dtype]).contiguous().view(-1)
        plain += 2 * len(weights)
        if parameter.dim() < 2:
            first, planes = first + 2 * len(weights), planes + 2 * len(weights)
            continue
        for plane in range(planes_of(split)):
            size = sum(
                len(encode(stream.numpy().tobytes())[1]) for stream in made.cut(weights.view(torch.int16), plane)
            )
            first, planes = first + (0 if plane else size), planes + size
    return Bytes(plain, first, planes)


@contextmanager
def coarse(model: PreTrainedModel, split: str, dtype: str) -> Iterator[PreTrainedModel]:
    """``model`` as the first plane of its weights in ``dtype`` makes it, vectors whole; as it was after it."""
    exact = {parameter: parameter.data for parameter in model.parameters()}
    made = cutter(split, dtype)
    try:
        for parameter, data in exact.items():
            words = data.to(STORED[dtype]).contiguous().view(-1).view(torch.int16)
            if parameter.dim() > 1:
                words = made.first(made.cut(words, 0), len(words))
            parameter.data = words.view(STORED[dtype]).view(data.shape).to(data.dtype)
        yield model
    finally:
        for parameter, data in exact.items():
            parameter.data = data
