"""The largest weights first, to compare with: a mask of one bit a weight, and the values that are kept, coded.

After DLP (Chen et al., Dynamic Layerwise Pruning, ICML 2025) a layer keeps less where its median weight is large, so
that few stand out; DLP looks at activations too, which nobody has who has only the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.planes.coarse import STORED, Bytes
from firsttoken.progressiveserve.planes.codec import encode
from firsttoken.progressiveserve.planes.cutting import cutter
from firsttoken.study.errors import StageError

NAME, SPREAD = "sparse ", 0.1  # of the shares that layers keep, to either side of their mean


@dataclass(frozen=True)
class Sparse:
    """As many of the largest weights as come to ``share`` of the plain bytes, mask and values."""

    share: float
    later, exact = (), False  # as a Mixture has them

    @classmethod
    def parse(cls, text: str) -> Sparse:
        """Of "sparse 0.354". Raises StageError for what is no share."""
        share = text.removeprefix(NAME)
        if not (share.replace(".", "", 1).isdecimal() and 0.1 <= float(share) <= 1):
            raise StageError(f"{text!r} keeps no share of the bytes: write one from 0.1 to 1, such as 'sparse 0.354'")
        return cls(float(share))


@contextmanager
def sparse(model: PreTrainedModel, kept: Sparse, dtype: str) -> Iterator[Bytes]:
    """``model`` with its smallest weights 0, stored as ``dtype``, and what it weighs so; as it was after it."""
    exact = {name: parameter.data for name, parameter in model.named_parameters()}
    stored = {name: data.to(STORED[dtype]) for name, data in exact.items()}
    matrices = {name: data for name, data in stored.items() if data.dim() > 1}
    weights = sum(data.numel() for data in matrices.values())
    plain, mask = 2 * sum(data.numel() for data in stored.values()), weights // 8
    whole = plain - 2 * weights + mask
    every = sum(_coded(data, dtype) for data in matrices.values())
    budget = kept.share * plain - whole
    mean, values = budget / every, 0
    for _ in range(2):  # large weights code better than all do: after one round it is known by how much
        mean *= budget / values if values else 1
        shares, values = _shares(matrices, mean), 0
        for name, data in matrices.items():
            sizes = data.abs().float().flatten()
            least = sizes.kthvalue(max(1, len(sizes) - int(shares[layer_of(name)] * len(sizes)))).values
            stored[name] = torch.where(data.abs() >= least, data, 0)
            values += _coded(data[data.abs() >= least], dtype)
    try:
        for name, parameter in model.named_parameters():
            parameter.data = stored[name].to(parameter.dtype)
        yield Bytes(plain, whole + values, whole + every)
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = exact[name]


def _shares(matrices: dict[str, Tensor], mean: float) -> dict[int | None, float]:
    """What every layer keeps: ``mean`` on average, less where the median weight is a larger part of their mean."""
    layers: dict[int | None, list[Tensor]] = {}
    for name, data in matrices.items():
        layers.setdefault(layer_of(name), []).append(data.abs().float().flatten())
    sizes = {layer: torch.cat(each) for layer, each in layers.items()}
    medians = {layer: float(size.median() / size.mean()) for layer, size in sizes.items()}
    average = sum(medians[layer] * len(size) for layer, size in sizes.items()) / sum(map(len, sizes.values()))
    widest = max(abs(median - average) for median in medians.values()) or 1.0
    return {layer: min(1.0, max(0.0, mean - SPREAD * (one - average) / widest)) for layer, one in medians.items()}


def _coded(data: Tensor, dtype: str) -> int:
    streams = cutter("lossless", dtype).cut(data.cpu().contiguous().flatten().view(torch.int16), 0)
    return sum(len(encode(stream.numpy().tobytes())[1]) for stream in streams)
