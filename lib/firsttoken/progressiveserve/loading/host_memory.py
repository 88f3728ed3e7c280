"""Memory for weights on the device that computes: on CUDA, files come through a few pinned buffers."""

from __future__ import annotations

import math
import queue
from collections import deque

import torch
from torch import Tensor

from firsttoken.progressiveserve.loading.read_memory import Memory
from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken.study.errors import LinkError
from firsttoken.study.system.direct_io import back

LINE = 64  # bytes
BUFFERS = 6  # pinned, of the size of the largest file


class WeightMemoryBlock:
    """Memory for ``size`` bytes of weights on ``device``, in one piece. Large pages are not asked for: on a virtual
    machine whose host gives memory back, a start of 540 MB took 2.1 s with them for 1.0 s without (medians, n=5, 6).

    It goes with the last weight. What malloc frees of a thread that has ended stays in the process: layers that were
    fused one by one kept the memory of the whole model, 2.2 times its bytes at the peak.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._remaining = self._all = host_memory(size) if device.type == "cpu" and size else memoryview(b"")

    def back(self) -> None:
        """Have the room in memory before it is written to, which may be while what goes there is still on its way."""
        back(self._all)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the room, its values whatever they are; ``room_for`` says what one needs."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        tensor = torch.frombuffer(self._remaining, dtype=dtype, count=math.prod(shape)).view(shape)
        self._remaining = self._remaining[room_for(shape, dtype) :]
        return tensor


def room_for(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor in a ``WeightMemoryBlock``, where each begins at a line of the cache."""
    return -(-math.prod(shape) * dtype.itemsize // LINE) * LINE


class PinnedMemory(Memory):
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

    def to_device(self, data: memoryview) -> tuple[Tensor, torch.cuda.Event]:
        source = torch.frombuffer(data, dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            target = torch.empty(len(data), dtype=torch.uint8, device=self._device)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        if (lent := self._lent.pop(id(data.obj), None)) is not None:  # else read before torch was there
            self._copying.append((event, lent))
        # Buffers come back here and nowhere else, and a reader may wait for one: only the latest copy may keep its own.
        while self._copying and (len(self._copying) > 1 or self._copying[0][0].query()):
            done, buffer = self._copying.popleft()
            done.synchronize()
            self._free.put(buffer)
        return target, event

    def free(self, data: memoryview) -> None:
        if (lent := self._lent.pop(id(data.obj), None)) is not None:
            self._free.put(lent)

    def close(self) -> None:
        self._free.put(None)


def memory_for(device: torch.device, largest: int, buffers: int) -> Memory:
    """The memory for weights that compute on ``device``; ``largest`` is the longest file in bytes, with its padding."""
    return PinnedMemory(device, largest, buffers) if device.type == "cuda" else Memory()
