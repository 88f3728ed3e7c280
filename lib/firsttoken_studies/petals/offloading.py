"""Offloading as it is measured beside a swarm: each layer's weights are brought for each token, from memory or disk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firsttoken.assets.layers import layers_of
from firsttoken.study.errors import StorageError


class _Brought(nn.Module):
    """Layer ``index`` of a model: its weights come into the one working layer, which then runs."""

    def __init__(self, index: int, weights: Resting) -> None:
        super().__init__()
        self._index, self._weights = index, [weights]  # in a list, so that it is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._weights[0].layer(self._index)(*args, **kwargs)


class Resting:
    """The weights of ``layers`` as one row each, in host memory [layers, parameters] or in ``file``; a step brings
    ``step_bytes``."""

    def __init__(self, layers: nn.ModuleList, file: Path | None) -> None:
        rows = torch.stack([torch.cat([p.data.flatten() for p in layer.parameters()]) for layer in layers])
        self._working, self._buffer, on_gpu = copy.deepcopy(layers[0]), torch.ones_like(rows[0]), rows.is_cuda
        self._rows = rows.cpu().pin_memory() if on_gpu else rows
        self._arrival = torch.ones_like(self._rows[0]).pin_memory() if on_gpu else self._buffer
        at = 0
        for parameter in self._working.parameters():
            parameter.data = self._buffer[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        self.row_bytes, self._file = self._buffer.numel() * self._buffer.element_size(), None
        self.step_bytes = self.row_bytes * len(layers)
        if file is not None:
            file.write_bytes(_bytes_of(self._rows))
            self._file, self._rows = open(file, "rb", buffering=0), self._rows[:0]  # noqa: SIM115 closed by offloaded

    def layer(self, index: int) -> nn.Module:
        """Layer ``index``, brought. Raises StorageError where the file ends too early."""
        if self._file is None:
            self._buffer.copy_(self._rows[index])
        else:
            self._file.seek(index * self.row_bytes)
            if self._file.readinto(_bytes_of(self._arrival)) != self.row_bytes:
                raise StorageError("the offloaded layers' file is cut short; run it again")
            if self._arrival is not self._buffer:
                self._buffer.copy_(self._arrival)
        self._working.self_attn.layer_idx = index
        return self._working

    def bring_all(self) -> None:
        """What a step brings, and nothing computed."""
        for index in range(self.step_bytes // self.row_bytes):
            self.layer(index)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


@contextmanager
def offloaded(model: nn.Module, file: Path | None = None) -> Iterator[Resting]:
    """Within the block the layers of ``model`` lie in memory, or in ``file``, and come one by one when they run.

    Yields where they rest. Its layers are of one shape, as those of Llama-like models are.
    """
    layers = layers_of(model)
    weights = Resting(layers, file)
    model.model.layers = nn.ModuleList(_Brought(index, weights) for index in range(len(layers)))
    try:
        yield weights
    finally:
        model.model.layers = layers
        weights.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")
