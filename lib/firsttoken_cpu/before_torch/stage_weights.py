"""The weights of a first stage, packed as its files arrive, for a model that computes before torch is there.

What has been read serves twice: the kernels read the packed weights, and torch's own load of the stage, which comes
behind, begins with the same files (:class:`UnpackedFiles`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.assets.adapter_config import MEND, lora_config
from firsttoken.assets.adapter_files import HalvesByLayer, lora_halves
from firsttoken.assets.servable import model_shapes
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import (
    CONFIG,
    Manifest,
    check_complete,
    check_header,
    check_side,
    read_manifest,
)
from firsttoken.progressiveserve.checkpoint.names import EMBEDDING, HEAD, NORM, torch_dtype
from firsttoken.progressiveserve.checkpoint.part_formats import (
    AllocateTensor,
    PartFormat,
    PartReader,
    StoredPart,
    WordUnpacker,
    format_of,
    stored_tensor,
)
from firsttoken.progressiveserve.loading.read_plan import ADAPTER_FILES, Folder, open_reader, parts_of
from firsttoken.progressiveserve.loading.reader import host_memory
from firsttoken.study.errors import NotLean, StageError
from firsttoken.study.parsing.parse_errors import errors_as
from firsttoken.study.system.cgroup_limits import cores
from firsttoken.study.system.direct_io import back
from firsttoken_cpu.before_torch.numpy_weights import (
    NO_HALVES,
    NumpyWeights,
    PackedWeights,
    Packer,
    first_fault,
    stored_name,
)
from firsttoken_cpu.lean.lean_config import lean_config
from firsttoken_cpu.native.exports import STORAGE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder

Arrays = dict[str, np.ndarray]


class UnpackedFiles:
    """The ``files`` of a stage that have been read, by place, as a reader gives them; ``unpacked`` are the tensors, in
    the dtype that they are stored in, which lie in a format in the files."""

    def __init__(self, files: Mapping[int, memoryview], unpacked: Arrays) -> None:
        self._files, self.unpacked = files, unpacked

    def wait(self, index: int) -> memoryview:
        """Return the file ``index``, which is there."""
        return self._files[index]

    def close(self) -> None:
        """Do nothing: nothing is being read."""

    def builder(
        self, manifest: Manifest, stages: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> WeightBuilder:
        """Return a builder that makes torch's weights of the files; nothing is unpacked twice."""
        from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder

        return WeightBuilder(
            manifest, stages, self, device, dtype, formats=lambda name: UnpackedFormat(format_of(name), self.unpacked)
        )


class UnpackedFormat(PartFormat):
    """A ``handler`` of parts of which some tensors have been ``unpacked`` before."""

    def __init__(self, handler: PartFormat, unpacked: Arrays) -> None:
        self._handler, self._unpacked = handler, unpacked

    def reader(self, dtype: torch.dtype) -> UnpackedReader:
        """Return a reader that takes what has been unpacked."""
        return UnpackedReader(self._handler.reader(dtype), self._unpacked, dtype)


class UnpackedReader:
    """A ``reader`` of parts whose tensors may have been ``unpacked`` before, those of a part together."""

    def __init__(self, reader: PartReader, unpacked: Arrays, dtype: torch.dtype) -> None:
        self._reader, self._unpacked, self._dtype = reader, unpacked, dtype

    def copied_shapes(self, part: StoredPart) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that were not unpacked, or are of another dtype."""
        if part.carried.keys().isdisjoint(self._unpacked):
            return self._reader.copied_shapes(part)
        return [tensor.shape for name, tensor in part.carried.items() if not self._stays(name, tensor.dtype)]

    def read(self, part: StoredPart, file: memoryview, data: Tensor, allocate: AllocateTensor) -> dict[str, Tensor]:
        """The tensors; a norm need not hold the memory of the file."""
        import torch

        if part.carried.keys().isdisjoint(self._unpacked):
            return self._reader.read(part, file, data, allocate)
        weights: dict[str, Tensor] = {}
        for name, tensor in part.carried.items():
            if name in self._unpacked:
                stored = torch.from_numpy(self._unpacked[name]).view(torch_dtype(tensor.dtype))
            else:
                stored = stored_tensor(part, name, data)
            weights[name] = stored if self._stays(name, tensor.dtype) else allocate(tensor.shape).copy_(stored)
        return weights

    def _stays(self, name: str, stored: str) -> bool:
        return name in self._unpacked and torch_dtype(stored) == self._dtype


class StageWeights(NumpyWeights):
    """The weights of ``stages`` (1-based, together) of the staged checkpoint in ``folder``, with their adapter.

    From now on ``readers`` threads for each of ``links`` read its files, from ``source`` where that is given, and
    ``threads`` (all cores, unless given) decode and pack what has come, in the order of the forward pass. ``verify``
    holds files against their sha256.

    Raises NotLean, in one line, for a stage that needs torch: of another architecture or stored dtype, in a format
    that is not decoded without, of shapes that the kernels do not have. Raises ModelError for a folder that is no
    staged checkpoint of the model of its config.json.
    """

    def __init__(
        self,
        folder: Path,
        links: Sequence[Link],
        *,
        stages: Sequence[int] = (1,),
        source: Folder | None = None,
        readers: int = 8,
        threads: int | None = None,
        verify: bool = True,
    ) -> None:
        manifest = self.manifest = read_manifest(folder)
        check_side(folder, manifest, CONFIG)
        config = lean_config(folder)
        self._parts = parts_of(manifest, stages)
        if any(part.refines for part in self._parts):
            raise NotLean("a later stage refines weights that are there")
        # what needs torch is known before bytes are asked for: over a slow link it takes seconds to stop its readers
        tensors = (tensor for part in self._parts for tensor in part.carried.values())
        self.packer = Packer(config, stored_name(tensor.dtype for tensor in tensors))
        fillers = [self._fillers() for _ in range(threads or cores())]
        self._reader = open_reader(source or folder, manifest, stages, links, threads=readers, verify=verify)
        try:  # while the first bytes are on their way
            check_complete(folder, manifest, model_shapes(folder, config))
        except BaseException:
            self._reader.close()
            raise
        self._head_name = EMBEDDING if manifest.tied else HEAD
        self._complete = False
        self._files: dict[int, memoryview] = {}
        self._unpacked: Arrays = {}
        end_parts = [part for part in self._parts if part.layer is None]
        # embedding, norm and head as they are stored, which are there before the head is packed
        self._end_parts: dict[str, Future[np.ndarray]] = {name: Future() for part in end_parts for name in part.carried}
        self._head: PackedWeights
        self._adapter: Future[HalvesByLayer] = Future()
        self._made: list[Future[PackedWeights | None]] = [Future() for _ in self._parts]
        self._last = manifest.stages[max(stages) - 1]
        self._first = len(ADAPTER_FILES) if self._last.adapter else 0
        turns = iter(range(-1, len(self._parts))), threading.Lock()
        arguments = [(turns, fillers_of_worker) for fillers_of_worker in fillers]
        self._workers = [
            threading.Thread(target=self._work, args=worker_arguments, name="packing", daemon=True)
            for worker_arguments in arguments
        ]
        for worker in self._workers:
            worker.start()

    @property
    def packed(self) -> bool:
        self._complete = self._complete or all(made.done() and made.exception() is None for made in self._made)
        return self._complete

    @property
    def fault(self) -> BaseException | None:
        return first_fault((self._adapter, *self._made))

    def wait(self, timeout_s: float | None = None) -> None:
        wait(self._made, timeout_s)

    def read(self) -> UnpackedFiles:
        """Return what has been read, once all has come. Raises as :meth:`layers`."""
        for made in (self._adapter, *self._made):
            made.result()
        self.close()
        return UnpackedFiles(self._files, self._unpacked)

    @property
    def panels(self) -> dict[int, dict[str, np.ndarray]]:
        """The packed weights of each layer (0-based) by product. Raises as :meth:`layers`."""
        packed = zip(self._parts, self._made, strict=True)
        return {part.layer: made.result().panels for part, made in packed if part.layer is not None}

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self.packer.computed(self._end_parts[EMBEDDING].result()[ids])

    def head(self) -> PackedWeights:
        for part, made in zip(self._parts, self._made, strict=True):
            if self._head_name in part.carried:
                made.result()
        return self._head

    def norm(self) -> np.ndarray:
        return self.packer.computed(self._end_parts[NORM].result())

    def close(self) -> None:
        self._reader.close()
        for worker in self._workers:
            worker.join()

    def _packed_layers(self) -> Iterator[PackedWeights]:
        for part, made in zip(self._parts, self._made, strict=True):
            if part.layer is not None:
                yield made.result()

    def _fillers(self) -> dict[str, WordUnpacker]:
        """Return the fillers that decode parts in a format, by its name, for one thread. Raises NotLean for those that
        need torch."""
        fillers = {}
        for name in {part.format for part in self._parts} - {""}:
            filler = format_of(name).word_unpacker([part for part in self._parts if part.format == name])
            if filler is None:
                raise NotLean(f"its parts in {name!r} are decoded by torch")
            fillers[name] = filler
        return fillers

    def _work(self, turns: tuple[Iterator[int], threading.Lock], fillers: Mapping[str, WordUnpacker]) -> None:
        """Make what the model waits for of one file after the other; -1 are those of the adapter, which come first."""
        indices, lock = turns
        while True:
            with lock:
                if (index := next(indices, None)) is None:
                    return
            made = self._adapter if index < 0 else self._made[index]
            try:
                made.set_result(self._read_adapter() if index < 0 else self._make(index, fillers))
            except Exception as error:
                made.set_exception(error)
                for name in self._end_parts.keys() & self._parts[index].carried.keys() if index >= 0 else ():
                    if not self._end_parts[name].done():
                        self._end_parts[name].set_exception(error)

    def _read_adapter(self) -> HalvesByLayer:
        for index in range(self._first):
            self._files[index] = self._reader.wait(index)
        if not self._first:
            return {}
        with errors_as(f"adapter of stage {self._last.name}", StageError, MEND):
            config, weights = (bytes(self._files[index]) for index in range(self._first))
            halves = lora_halves(lora_config(config), weights)
        if unknown_layers := sorted(halves.keys() - {part.layer for part in self._parts}):
            raise StageError(
                f"the adapter of stage {self._last.name} is for layer {unknown_layers[0]} too, which does not come"
            )
        return halves

    def _make(self, index: int, fillers: Mapping[str, WordUnpacker]) -> PackedWeights | None:
        part, stored = self._parts[index], STORAGE[self.packer.stored]
        sizes = {name: math.prod(carried.shape) for name, carried in part.carried.items() if name not in part.tensors}
        words = np.empty(0, stored)
        if sizes:
            room = host_memory(sum(sizes.values()) * words.itemsize)
            back(room)  # while the file is on its way
            words = np.frombuffer(room, stored)
        file = self._files[self._first + index] = self._reader.wait(self._first + index)
        check_header(part, bytes(file[: part.data_start]))
        arrays = Arrays()
        for name, entry in part.carried.items():
            if name in sizes:
                tensor_words, words = words[: sizes[name]], words[sizes[name] :]
                fillers[part.format].fill(part, name, file, tensor_words)
                arrays[name] = self._unpacked[name] = tensor_words.reshape(entry.shape)
            else:
                raw = np.frombuffer(file, np.uint8, entry.end - entry.start, entry.start)
                arrays[name] = np.require(raw.view(stored).reshape(entry.shape), requirements="A")
        if part.layer is None:
            return self._make_ends(arrays)
        prefix = f"model.layers.{part.layer}."
        halves = self._adapter.result().get(part.layer, NO_HALVES)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in arrays.items()}
        laid_out, jobs = self.packer.layer(part.layer, tensors, halves)
        self.packer.pack(jobs)
        return laid_out

    def _make_ends(self, arrays: Arrays) -> None:
        for name, tensor in arrays.items():
            self._end_parts[name].set_result(tensor)
        if self._head_name in arrays:
            self._head, job = self.packer.head(arrays[self._head_name])
            self.packer.pack([job])
