"""The memory that arriving files are read into, and stay in where a CPU computes with them (no torch until they do)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken.study.errors import LinkError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AHEAD = 24 << 20  # bytes that wait to refine weights
BEFORE_TORCH = 80 << 20  # the same while nobody can refine: what 1 Gbit/s brings during an import of 0.6 s


class Memory:
    """A place for weights, which are used where they were read: no second copy, and a layer's memory goes when the
    layer goes."""

    def allocate(self, size: int) -> memoryview:
        """``size`` bytes to read into; may wait until some are free."""
        return host_memory(size)

    def to_device(self, data: memoryview) -> tuple[Tensor, torch.cuda.Event | None]:
        """The bytes [n] as uint8 where the model computes, and the event after which they may be used."""
        import torch

        return torch.frombuffer(data, dtype=torch.uint8), None

    def free(self, data: memoryview) -> None:
        """Free ``data``, whose bytes have refined weights and are needed no more. Does nothing where the bytes go with
        their last weight."""

    def close(self) -> None:
        """End the load: a thread that waits in :meth:`allocate` gets a LinkError."""


class RefinementMemory(Memory):
    """Memory for files that refine weights and are let go: ``most`` bytes of files wait for that, or one file.

    Refinements wait for the steps of an engine, so a link that is faster would pile up all that is still to come.
    """

    def __init__(self, most: int = AHEAD) -> None:
        self._most, self._closed = most, False
        self._held: dict[int, int] = {}
        self._change = threading.Condition()

    def allocate(self, size: int) -> memoryview:
        with self._change:
            self._change.wait_for(
                lambda: self._closed or not self._held or sum(self._held.values()) + size <= self._most
            )
            if self._closed:
                raise LinkError("the load was stopped")
            data = host_memory(size)
            self._held[id(data.obj)] = size
        return data

    def free(self, data: memoryview) -> None:
        with self._change:
            self._held.pop(id(data.obj), None)
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


def cpu_memory(refines: bool, links: int, most: int = AHEAD) -> Memory:
    """The memory for files that come over as many ``links`` to where a CPU computes; where each of them ``refines``
    weights, ``most`` bytes wait for it."""
    return RefinementMemory(most) if refines and links == 1 else Memory()
