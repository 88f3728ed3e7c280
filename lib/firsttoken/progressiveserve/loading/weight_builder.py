"""Weights made of the files that arrive, before there is a model to take them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from firsttoken.progressiveserve.checkpoint.manifest import Manifest, PartFile, check_header
from firsttoken.progressiveserve.checkpoint.part_formats import PartFormat, format_of
from firsttoken.progressiveserve.loading.host_memory import BUFFERS, WeightMemoryBlock, memory_for, room_for
from firsttoken.progressiveserve.loading.read_memory import Memory
from firsttoken.progressiveserve.loading.read_plan import ADAPTER_FILES, parts_of
from firsttoken.study.errors import LinkError
from firsttoken.study.system.openmp import loops_on_one_core


class BuiltPart(NamedTuple):
    """A part that has come: its ``file``, the weights that it brings by name, and the event after which they may be
    used."""

    file: memoryview
    weights: dict[str, Tensor]
    copied: torch.cuda.Event | None


class PartFiles(Protocol):
    """The files of a load by their place in it, as ``reader.BlobReader`` brings them."""

    def wait(self, index: int) -> memoryview:
        """The file ``index``, once it is there. Raises as ``BlobReader.wait``."""

    def close(self) -> None:
        """Stop reading what has not come."""


class WeightBuilder:
    """Makes the weights of ``stages`` on ``device`` in ``dtype``, part by part, as ``reader`` brings them; ``formats``
    gives the handler of a format by its name.

    It needs no model, so it may begin while one is built: in a start of bits over 1 Gbit/s a third of all bytes had
    come by then, and the last were weights half a second after they came (one start, two cores).
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Sequence[int],
        reader: PartFiles,
        device: torch.device,
        dtype: torch.dtype,
        memory: Memory | None = None,
        formats: Callable[[str], PartFormat] = format_of,
    ) -> None:
        self._parts = parts_of(manifest, stages)
        self.manifest, self.reader = manifest, reader
        self.memory = memory or memory_for(device, max((part.bytes for part in self._parts), default=0), BUFFERS)
        self.seconds = 0.0  # that were spent on weights, not on waiting for bytes
        self._first = 0 if manifest.stages[max(stages) - 1].adapter is None else len(ADAPTER_FILES)
        self._dtype, self._stopped = dtype, False
        names = {part.format for part in self._parts if not part.refines}
        self._readers = {name: formats(name).reader(dtype) for name in names}
        self._made: queue.SimpleQueue[BuiltPart | Exception] = queue.SimpleQueue()
        rooms = []
        for part in self._parts:  # for weights that cannot stay where they are read
            shapes = [] if part.refines else self._readers[part.format].copied_shapes(part)
            rooms.append(WeightMemoryBlock(sum(room_for(shape, dtype) for shape in shapes), device))
        backing = threading.Thread(target=self._back, args=(deque(rooms),), name="rooms", daemon=True)
        self._threads = (on_pinned_core("builder", partial(self._make_all, deque(rooms))), backing)
        backing.start()

    def next_part(self) -> BuiltPart:
        """The next part. Raises what the reader raises, and ModelError for what cannot be made weights."""
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made

    def stop(self) -> None:
        """Make no more; whoever waits for a part gets a LinkError."""
        self._stopped = True
        self.memory.close()

    def close(self) -> None:
        """Stop, stop reading, and wait for both: a thread that is in torch when the process ends aborts it."""
        self.stop()
        self.reader.close()
        for thread in self._threads:
            thread.join()

    def _back(self, rooms: deque[WeightMemoryBlock]) -> None:
        """Have ``rooms`` in memory while files are on their way, so that the maker need not wait for memory.

        Taken from the queue: layers that are fused while others come must be able to give their memory back.
        """
        while rooms and not self._stopped:
            rooms.popleft().back()

    def _make_all(self, rooms: deque[WeightMemoryBlock]) -> None:
        try:
            for index, part in enumerate(self._parts):
                if self._stopped:
                    raise LinkError("the load was stopped")
                self._made.put(self._make(index, part, rooms.popleft()))
        except Exception as error:
            self._stopped = True
            self._made.put(error)

    def _make(self, index: int, part: PartFile, room: WeightMemoryBlock) -> BuiltPart:
        file, first = self.reader.wait(self._first + index), part.data_start
        begin = time.perf_counter()
        check_header(part, bytes(file[:first]))
        weights: dict[str, Tensor] = {}
        copied = None
        if not part.refines:
            data, copied = self.memory.to_device(file[first:])
            weights = self._readers[part.format].read(part, file, data, partial(room.take, dtype=self._dtype))
        self.seconds += time.perf_counter() - begin
        return BuiltPart(file, weights, copied)


def on_pinned_core(name: str, work: Callable[[], None]) -> threading.Thread:
    """A thread that has begun ``work`` beside a forward pass, and takes none of its processors: torch's parallel loops
    run on one core in it.

    With two threads for the placer and two for the forward pass, on two cores, each loop waits for one that does not
    run: the first bits of a model of 135 M took 1.06 to 1.45 s to place so, and 0.82 to 1.04 s on one (n=3 each).
    """

    def alone() -> None:
        loops_on_one_core()
        work()

    thread = threading.Thread(target=alone, name=name, daemon=True)
    thread.start()
    return thread
