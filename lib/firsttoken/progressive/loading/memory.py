"""Where arriving bytes are put: on a CPU into the memory they stay in, on CUDA through a few pinned buffers."""

from __future__ import annotations

import queue
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from firsttoken.progressive.loading.reader import host_memory
from firsttoken.study.errors import LinkError

BUFFERS = 6  # pinned, of the size of the largest file


class Memory(Protocol):
    """What the loader asks of a place for weights."""

    def allocate(self, size: int) -> memoryview:
        """``size`` bytes to read into; may wait until some are free."""

    def settle(self, data: memoryview) -> tuple[Tensor, torch.cuda.Event | None]:
        """The bytes [n] as uint8 where the model computes, and the event after which they may be used."""

    def close(self) -> None:
        """The load is over: who waits in :meth:`allocate` gets a LinkError."""


class HostMemory:
    """Weights are used where they were read: no second copy, and a layer's memory goes when the layer goes."""

    def allocate(self, size: int) -> memoryview:
        return host_memory(size)

    def settle(self, data: memoryview) -> tuple[Tensor, None]:
        return torch.frombuffer(data, dtype=torch.uint8), None

    def close(self) -> None:
        """Nobody waits here."""


class PinnedMemory:
    """``count`` pinned buffers of ``size`` bytes, from which a stream of its own copies to the device.

    A buffer is filled again when its copy is done, so a reader that runs ahead of the copies waits here.
    """

    def __init__(self, device: torch.device, size: int, count: int) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._lent: dict[int, Tensor] = {}
        self._copying: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        for _ in range(count):
            self._free.put(torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def allocate(self, size: int) -> memoryview:
        if (buffer := self._free.get()) is None:
            self._free.put(None)  # for the next one who waits
            raise LinkError("the load was stopped")
        view = memoryview(buffer.numpy())[:size]
        self._lent[id(view.obj)] = buffer
        return view

    def settle(self, data: memoryview) -> tuple[Tensor, torch.cuda.Event]:
        source = torch.frombuffer(data, dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            target = torch.empty(len(data), dtype=torch.uint8, device=self._device)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        if (lent := self._lent.pop(id(data.obj), None)) is not None:  # else read before torch was there
            self._copying.append((event, lent))
        while self._copying and (len(self._copying) > 1 or self._copying[0][0].query()):
            done, buffer = self._copying.popleft()
            done.synchronize()
            self._free.put(buffer)
        return target, event

    def close(self) -> None:
        self._free.put(None)


def memory_for(device: torch.device, largest: int, buffers: int) -> Memory:
    """The memory for weights that compute on ``device``; ``largest`` is the longest file in bytes, with its padding."""
    return PinnedMemory(device, largest, buffers) if device.type == "cuda" else HostMemory()
