"""The loads of a server that grows: one stage after another, each begun as early as it can be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.assets.model_config import CONFIG
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, PartFile, read_manifest
from firsttoken.progressiveserve.checkpoint.names import torch_dtype
from firsttoken.progressiveserve.loading.read_memory import BEFORE_TORCH, Memory, cpu_memory
from firsttoken.progressiveserve.loading.read_plan import adapter_blobs, open_reader, part_blobs, parts_of
from firsttoken.progressiveserve.loading.reader import BlobReader
from firsttoken.study import dtypes
from firsttoken.study.errors import FirstTokenError, permanent_faults
from firsttoken.study.system.cgroup_limits import free_memory_bytes

if TYPE_CHECKING:  # imported by the thread that loads, while requests are already taken
    import torch

    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken.progressiveserve.loading.meta_model import MetaModel
    from firsttoken.progressiveserve.loading.views import StageView
    from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder


class StageLoader:
    """Loads the stages of the checkpoint in ``folder`` over ``links`` by ``threads`` readers a link, one stage after
    another; ``dtype`` as in :func:`firsttoken.study.dtypes.serving`."""

    def __init__(self, folder: Path, links: Sequence[Link], *, device: str, dtype: str, threads: int) -> None:
        self.folder, self.links, self._device, self._dtype = folder, list(links), device, dtype
        self._threads = threads
        self._lock = threading.Lock()
        self._closed = False
        self._loading: StageLoad | None = None
        self._ahead: dict[int, tuple[BlobReader, Memory]] = {}  # by stage, begun before its turn
        self._reached = self._finished = 0  # the last stage whose load has begun, and the last whose load has ended
        # how many first layers of a stage are there, by the last finished stage, the parts of the next, and that stage
        self._arrived: dict[tuple[int, int | None, int], int] = {}
        self._builder: WeightBuilder | None = None  # of stage 1, begun before there is a model
        self.manifest: Manifest
        self.meta_model: MetaModel
        self.bytes_total = 0  # of all stages

    def read_ahead(self, stage: int, manifest: Manifest | None = None) -> None:
        """Begin to read ``stage`` before its turn, where that can be done without torch; what is wrong with it is for
        :meth:`plan`. The folder's ``manifest`` is read unless it is given."""
        if self._device != "cpu":  # the load wants pinned memory
            return
        with suppress(FirstTokenError):
            manifest = manifest or read_manifest(self.folder)
            refines = all(part.refines for part in parts_of(manifest, [stage]))
            memory = cpu_memory(refines, len(self.links), BEFORE_TORCH)
            options = {"threads": self._threads, "allocate": memory.allocate}
            with self._lock:
                if not self._closed and stage > self._reached:
                    reader = open_reader(self.folder, manifest, [stage], self.links, **options)
                    self._ahead[stage] = reader, memory

    def plan(self) -> int:
        """Return the number of the stages; the number of their bytes is known then. Raises ModelError and
        StageError."""
        manifest = self.manifest = read_manifest(self.folder)
        self._finished, self._arrived, stages = 0, {}, range(1, len(manifest.stages) + 1)
        every = [blobs(self.folder, manifest, [stage]) for stage in stages for blobs in (adapter_blobs, part_blobs)]
        self.bytes_total = sum(blob.bytes for blobs in every for blob in blobs)
        return len(stages)

    @property
    def bytes_moved(self) -> int:
        """Bytes that have come over all links, those of failed loads included."""
        return sum(link.bytes_moved for link in self.links)

    @property
    def fits_twice(self) -> bool:
        """Return whether there is memory for the weights once more."""
        free = free_memory_bytes()
        return free is None or free >= 2 * self.bytes_total

    @property
    def refines(self) -> bool:
        """Return whether a later stage changes weights that are there."""
        return any(part.refines for stage in self.manifest.stages for part in stage.parts)

    @property
    def shares_weights(self) -> bool:
        """Return whether a layer of which every part has come is the last stage's: the last stage has no adapter, and a
        part that comes once more refines the weights that are there, for every stage. A load that fails brings its
        parts again, of which none may make a layer coarse: a stage brings one part of a layer."""
        stages = self.manifest.stages
        layers = [[part.layer for part in stage.parts if part.layer is not None] for stage in stages]
        brought = [{part.layer for part in stage.parts if not part.refines} for stage in stages]
        once = sum(map(len, brought)) == len(set().union(*brought)) and all(
            len(set(numbers)) == len(numbers) for numbers in layers
        )
        return once and stages[-1].adapter is None

    def build(self, begun: Callable[[torch.device, torch.dtype], WeightBuilder] | None = None) -> MetaModel:
        """The model before its weights, which are read meanwhile; ``begun`` returns their builder where somebody else
        has begun with them. Raises ModelError and StageError, or PermanentFault."""
        import torch

        from firsttoken.engine.accelerator import build_model
        from firsttoken.progressiveserve.loading.meta_model import MetaModel
        from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder

        manifest = self.manifest
        computing = dtypes.serving(self._dtype, torch_dtype(manifest.dtype), self._device)
        target = torch.device(self._device), computing
        with self._lock:
            if begun is not None:
                self._builder = begun(*target)
            elif 1 in self._ahead:
                reader, memory = self._ahead.pop(1)
                self._builder = WeightBuilder(manifest, [1], reader, *target, memory)
        # a file that is not there yet may still be on its way, as a part of the model may; what a file says stays
        with permanent_faults() if (self.folder / CONFIG).is_file() else nullcontext():
            self.meta_model = MetaModel(self.folder, manifest, self._device, computing, build_model)
        return self.meta_model

    def load(self, stage: int, previous: StageView) -> StageLoad:
        """Begin to load all that brings ``previous`` to ``stage``, at once."""
        from firsttoken.progressiveserve.loading.loader import StageLoad
        from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder

        stages, meta_model = range(previous.stage + 1, stage + 1), self.meta_model
        with self._lock:
            builder, self._builder = self._builder, None  # whose it is from now on
            self._reached = stage
            if builder is None and [*stages] == [stage] and stage in self._ahead:
                reader, memory = self._ahead.pop(stage)
                builder = WeightBuilder(self.manifest, stages, reader, meta_model.device, meta_model.dtype, memory)
        options = {"threads": self._threads, "builder": builder}
        load = StageLoad(self.folder, self.manifest, stages, self.links, meta_model, previous, **options)
        # ``close`` may have run while the load was being made, and found none that it could stop.
        with self._lock:
            self._loading, closed = load, self._closed
        if closed:
            load.close()
        return load

    def finish(self, load: StageLoad) -> StageView:
        """Return the view of what ``load`` brings, once it is whole. Raises what the load raises."""
        view = load.wait()
        self._loading = None  # the load holds its stage's layers
        self._finished = view.stage
        return view

    def arrived(self, stage: int) -> int:
        """Return how many of the first layers of ``stage`` are in their places; the engine's thread asks."""
        depth = self.meta_model.model.config.num_hidden_layers
        last, count = self._finished, None  # read before the load, which ends before this changes
        if stage <= last:
            return depth
        if (load := self._loading) is not None:
            last, count = load.view.stage, load.placed_parts()
        if (key := (last, count, stage)) not in self._arrived:  # asked by every request, each millisecond
            absent = [] if load is None else load.parts[count:]
            absent += [part for later in self.manifest.stages[last:stage] for part in later.parts]
            self._arrived[key] = min((_layers_below(part, depth) for part in absent), default=depth)
        return self._arrived[key]

    def ended_by(self, error: Exception) -> bool:
        """Return whether ``error`` is what ended the load that was under way."""
        return self._loading is not None and self._loading.failure is error

    def close(self) -> None:
        """Stop the load that is under way, and begin no other."""
        with self._lock:
            self._closed = True
            loading, builder, ahead = self._loading, self._builder, [*self._ahead.values()]
        for reading in (loading, builder):
            if reading is not None:
                reading.close()
        for reader, memory in ahead:
            memory.close()
            reader.close()


def _layers_below(part: PartFile, depth: int) -> int:
    """Return how many of the first layers of ``depth`` compute as in the end while ``part`` is on its way. A step waits
    for the embedding and the head, unless they are there and only refined."""
    if part.layer is not None:
        return part.layer
    if not part.refines:
        return depth
    return 0 if any("embed_tokens" in name for name in part.carried) else depth - 1
