"""Weights as the kernels read them, laid out by numpy alone; those of a plain folder, which threads pack as they read.

A model that computes without torch (``numpy_model.py``) asks for them layer by layer, and waits for no other.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from firsttoken.assets.checkpoint import EMBEDDING, HEAD, ModelFiles
from firsttoken.assets.weight_files import CHANGED, WeightFile, file_states
from firsttoken.study.errors import ModelError, NotLean, StageError
from firsttoken.study.system.cgroup_limits import cores
from firsttoken_cpu.lean.lean_config import LeanConfig, lean_config
from firsttoken_cpu.native.exports import (
    PRODUCTS,
    STORAGE,
    WIDTHS,
    Exports,
    Halves,
    JobStruct,
    LayerStruct,
    PartStruct,
    WeightMemory,
    WeightStruct,
    load_exports,
    packed_adapter,
    widened,
)

_PACKED = {"F32": "float32", "BF16": "bfloat16"}
NORM = "model.norm.weight"
POLL_S = 0.001
NO_HALVES: Mapping[str, Halves] = {}


class PackedWeights(NamedTuple):
    """Weights as the kernels read them: the ``struct`` of a layer or of a weight, ``panels`` by product, and the other
    ``arrays`` that the struct points at."""

    struct: Any
    panels: dict[str, np.ndarray]
    arrays: list[Any]


@dataclass(frozen=True)
class FileRows:
    """A weight of this ``shape`` as it is stored in an open file, from the byte ``start`` on."""

    file: WeightFile
    start: int
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]


Stored = np.ndarray | FileRows


class Job(NamedTuple):
    """A weight that is to be packed, or numbers that are to be copied: the ``struct`` that tells ``pack_jobs`` of it,
    and the ``arrays`` that it points at."""

    struct: JobStruct
    arrays: list[Any]


class Packer:
    """Lays the weights of the model of ``config`` out for the kernels, and packs them.

    They are ``stored`` in a dtype and compute in ``dtype``: in the stored one, but in float32 where the processor has
    no instructions for bfloat16. Raises NotLean, in one line, for what the kernels do not run: a shape that they do
    not have, no compiler, or products that are wrong here.
    """

    def __init__(self, config: LeanConfig, stored: str) -> None:
        if config.head_dim not in WIDTHS:
            raise NotLean(f"its head_dim is {config.head_dim}")
        if uneven := [size for size in (config.hidden_size, config.intermediate_size) if size % 2]:
            raise NotLean(f"its products have {uneven[0]} inputs, an odd number")
        self.config, self.stored, self.exports = config, stored, _exports()
        bf16 = stored == "bfloat16" and self.exports.has_bfloat16
        self.dtype = "bfloat16" if bf16 else "float32"
        if not self.exports.multiplies(self.dtype):
            raise NotLean(f"its {self.dtype} products are wrong on this processor")
        self.memory = WeightMemory(huge=False)  # a first token waits for all of it

    def computed(self, stored: np.ndarray) -> np.ndarray:
        """``stored`` in the dtype that computes."""
        return stored if self.stored == self.dtype else widened(stored)

    def layer(
        self, number: int, tensors: Mapping[str, Stored], halves: Mapping[str, Halves] = NO_HALVES
    ) -> tuple[PackedWeights, list[Job]]:
        """The layer ``number`` (0-based) of its ``tensors``, as stored, by their names in the layer, and what is to be
        packed of them. ``halves`` are LoRA's by module, of which the kernels add the product.

        Raises StageError for ``halves`` of a module that the layer does not have, or of other sizes, and NotLean for
        those that the kernels do not add.
        """
        jobs: list[Job] = []
        norms = [self._vector([tensors[f"{name}_layernorm.weight"]], jobs) for name in ("input", "post_attention")]
        struct, panels = LayerStruct(number, *(norm.ctypes.data for norm in norms)), dict[str, np.ndarray]()
        arrays: list[Any] = norms
        for product, parts in PRODUCTS.items():
            biases = [tensors[name] for part in parts if (name := f"{part}.bias") in tensors]
            bias = self._vector(biases, jobs) if biases else None
            weights = [tensors[f"{part}.weight"] for part in parts]
            panels[product], weight, job = self._panels_for(weights, bias, gated=product == "gate_up")
            if any(part in halves for part in parts):
                arrays.append(self._add_adapter(weight, weights, [halves.get(part) for part in parts]))
            setattr(struct, product, weight)
            jobs.append(job)
            arrays.append(bias)
        if unknown := halves.keys() - {part for parts in PRODUCTS.values() for part in parts}:
            raise StageError(f"the adapter's {min(unknown)} does not fit this model's layers: train one for this model")
        return PackedWeights(struct, panels, arrays), jobs

    def head(self, weight: Stored) -> tuple[PackedWeights, Job]:
        """The head of its ``weight`` [vocabulary, hidden], and what is to be packed of it."""
        panels, struct, job = self._panels_for([weight], None, gated=False)
        return PackedWeights(struct, {"head": panels}, []), job

    def pack(self, jobs: Sequence[Job], taken: np.ndarray | None = None, done: np.ndarray | None = None) -> None:
        """Pack one after the other of ``jobs``, without the interpreter.

        Several threads may call this with the same ``taken`` [1], of zeros: each job is then one thread's. Of those
        that are done, ``done`` [jobs] is 1. Raises ModelError for a file that was cut, and OSError for one that cannot
        be read.
        """
        table = (JobStruct * len(jobs))(*(job.struct for job in jobs))
        taken = np.zeros(1, np.int64) if taken is None else taken
        done = np.zeros(len(jobs), np.int64) if done is None else done
        self._run(table, taken, done)
        if (faults := np.flatnonzero(done < 0)).size:
            file = next(part.file for part in jobs[faults[0]].arrays if _is_in_file(part))
            raise file.fault(-int(done[faults[0]]))

    def read(self, rows: FileRows, ids: np.ndarray | None = None) -> np.ndarray:
        """The rows of these ``ids`` [rows], or all, in the dtype that computes. Raises as :meth:`pack`."""
        width = math.prod(rows.shape[1:]) if ids is not None else math.prod(rows.shape)
        numbers = np.empty((1 if ids is None else len(ids), width), STORAGE[self.dtype])
        row_bytes = width * np.dtype(STORAGE[self.stored]).itemsize
        table = (JobStruct * len(numbers))()
        for job, target, row in zip(table, numbers, [0] if ids is None else ids.tolist(), strict=True):
            job.parts[0] = PartStruct(rows.start + row * row_bytes, width, rows.file.handle)
            job.parts[1].rows = target.ctypes.data
        done = np.zeros(len(table), np.int64)
        self._run(table, np.zeros(1, np.int64), done)
        if (fault := int(done.min())) < 0:
            raise rows.file.fault(-fault)
        return numbers if ids is not None else numbers.reshape(rows.shape)

    def _run(self, table: ctypes.Array[JobStruct], taken: np.ndarray, done: np.ndarray) -> None:
        self.exports.call("pack_jobs", self.dtype, table, len(table), self.stored == "bfloat16", taken, done)

    def _vector(self, stored: Sequence[Stored], jobs: list[Job]) -> np.ndarray:
        """The vectors ``stored``, one behind the other, in the dtype that computes: of those in a file, once the
        ``jobs`` that this adds are done."""
        if not any(map(_is_in_file, stored)):
            return self.computed(np.concatenate(stored))
        numbers = np.empty(sum(map(len, stored)), STORAGE[self.dtype])
        end = 0
        for vector in stored:
            target, end = numbers[end : end + len(vector)], end + len(vector)
            parts = (_part(vector), PartStruct(target.ctypes.data))
            jobs.append(Job(JobStruct(0, parts), [vector, target]))
        return numbers

    def _panels_for(
        self, weights: list[Stored], bias: np.ndarray | None, *, gated: bool
    ) -> tuple[np.ndarray, WeightStruct, Job]:
        """Room for ``weights`` [outputs, inputs], one below the other, as panels, and the struct that names them."""
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        step = self.exports.panel // 2 if gated else self.exports.panel
        count = -(-(outputs // 2 if gated else outputs) // step)
        panels = self.memory.allocate(count * self.exports.panel * inputs * np.dtype(STORAGE[self.dtype]).itemsize)
        struct = WeightStruct(panels.ctypes.data, 0 if bias is None else bias.ctypes.data, outputs, inputs, gated)
        job = JobStruct(ctypes.addressof(struct), tuple(map(_part, weights)))
        return panels, struct, Job(job, [struct, panels, *weights])

    def _add_adapter(self, struct: WeightStruct, weights: Sequence[Stored], halves: Sequence[Halves | None]) -> Any:
        """Write to ``struct`` that the product has an adapter; returns what that points at."""
        for weight, pair in zip(weights, halves, strict=True):
            if pair is not None and (len(pair[1]), pair[0].shape[1]) != weight.shape:
                raise StageError("the adapter does not fit this model's layers: train one for this model")
        adapter = packed_adapter(self.exports, self.dtype, struct, [len(weight) for weight in weights], halves)
        if adapter is None:
            raise NotLean("its adapter's halves do not fit the panels of the kernels")
        struct.adapter = adapter.struct
        return adapter


class NumpyWeights(ABC):
    """The weights of a model, which are laid out by ``packer`` and come one layer after the other."""

    packer: Packer
    _joined: ctypes.Array[LayerStruct] | None = None  # all layers

    @property
    @abstractmethod
    def packed(self) -> bool:
        """Return whether all weights are there."""

    @property
    @abstractmethod
    def fault(self) -> BaseException | None:
        """Return the reason why some weights cannot come; None while there is none."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all weights are there or cannot come, or until ``timeout_s`` is over."""

    @abstractmethod
    def rows(self, ids: np.ndarray) -> np.ndarray:
        """The embedding's rows of ``ids`` in the dtype that computes, in memory of their own. Raises as
        :meth:`layers`."""

    @abstractmethod
    def head(self) -> PackedWeights:
        """The head, packed. Raises as :meth:`layers`."""

    @abstractmethod
    def norm(self) -> np.ndarray:
        """The weight [hidden] of the last norm, in the dtype that computes. Raises as :meth:`layers`."""

    @abstractmethod
    def _packed_layers(self) -> Iterator[PackedWeights]:
        """The layers, one at a time as they are packed. Raises what brings them."""

    def layers(self) -> Iterator[ctypes.Array[LayerStruct]]:
        """The layers, one at a time as they are packed, later all at once. Raises what brings them."""
        if self._joined is not None:
            yield self._joined
            return
        structs = []
        for layer in self._packed_layers():
            structs.append(layer.struct)
            yield (LayerStruct * 1)(layer.struct)
        self._joined = (LayerStruct * len(structs))(*structs)

    @abstractmethod
    def close(self) -> None:
        """Bring no more: a thread that waits for a layer gets an error soon."""


class FolderWeights(NumpyWeights):
    """All weights of the plain model folder of ``files``, read and packed by ``threads`` (all cores, unless given).

    Raises NotLean as :class:`Packer`, and for another architecture or stored dtype, ModelError as
    :func:`lean_config`, and OSError for a file that cannot be opened. No weight is handed out of files that have been
    cut, or are others than they were: what asks for it raises ModelError.
    """

    def __init__(self, files: ModelFiles, threads: int | None = None) -> None:
        config = lean_config(files.folder)
        if files.second is not None:
            raise NotLean("its head is tied to the embedding, and both are stored")
        self.packer = Packer(config, stored_name(stored.entry.dtype for stored in files.tensors.values()))
        self.files, self.seen = files, file_states(files.files)
        self._opened = {path: WeightFile(path) for path in files.files}
        self._fault: ModelError | None = None
        self._verified = False
        self._head, first = self.packer.head(self._in_file(EMBEDDING if config.tie_word_embeddings else HEAD))
        jobs = [first]  # the largest first, so that one thread packs it beside the layers
        self._layers: list[tuple[PackedWeights, slice]] = []
        for number in range(config.num_hidden_layers):
            prefix = f"model.layers.{number}."
            # not read here: that would wait for the disk
            tensors = {name[len(prefix) :]: self._in_file(name) for name in files.tensors if name.startswith(prefix)}
            layer, more = self.packer.layer(number, tensors)
            self._layers.append((layer, slice(len(jobs), len(jobs) + len(more))))
            jobs += more
        taken, self._done = np.zeros(1, np.int64), np.zeros(len(jobs), np.int64)
        threads = threads or cores()
        packing = ThreadPoolExecutor(threads, "packing")
        self._packing = [packing.submit(self.packer.pack, jobs, taken, self._done) for _ in range(threads)]
        packing.shutdown(wait=False)

    @property
    def packed(self) -> bool:
        return bool((self._done == 1).all())

    @property
    def fault(self) -> BaseException | None:
        return self._fault or first_fault(self._packing)

    def wait(self, timeout_s: float | None = None) -> None:
        wait(self._packing, timeout_s)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        rows = self.packer.read(self._in_file(EMBEDDING), ids)
        self._check()
        return rows

    def head(self) -> PackedWeights:
        if not self._verified:  # every answer asks for it: none comes of files that changed while they were packed
            self._wait_for(slice(None))
            self._check()
            self._verified = True
        return self._head

    def norm(self) -> np.ndarray:
        return self.parameter(NORM)

    def close(self) -> None:
        """Do nothing: the system is reading already."""

    def _packed_layers(self) -> Iterator[PackedWeights]:
        for layer, jobs in self._layers:
            self._wait_for(jobs)
            yield layer

    @property
    def panels(self) -> list[dict[str, np.ndarray]]:
        """The packed weights of each layer by product."""
        self._wait_for(slice(1, None))
        return [layer.panels for layer, _ in self._layers]

    @property
    def small(self) -> list[str]:
        """The names of all parameters that are not packed."""
        packed = {f"{part}.weight" for parts in PRODUCTS.values() for part in parts} | {HEAD}
        return [name for name in self.files.tensors if not any(name.endswith(suffix) for suffix in packed)]

    def parameter(self, name: str) -> np.ndarray:
        """The tensor called ``name`` in the dtype that computes."""
        return self.packer.read(self._in_file(name))

    def _wait_for(self, jobs: slice) -> None:
        """Wait until these jobs are done. Raises what their thread raised."""
        while not (self._done[jobs] == 1).all():
            if not wait(self._packing, POLL_S).not_done and not self.packed:
                for ended in self._packing:
                    ended.result()

    def _in_file(self, name: str) -> FileRows:
        stored = self.files.tensors[name]
        return FileRows(self._opened[stored.file], stored.entry.start, tuple(stored.entry.shape))

    def _check(self) -> None:
        """Raise ModelError where the files are others than they were."""
        if self._fault is None and file_states(self.files.files) != self.seen:
            self._fault = ModelError(CHANGED.format(folder=self.files.folder))
        if self._fault is not None:
            raise self._fault


def _is_in_file(part: object) -> bool:
    return isinstance(part, FileRows)


def _part(stored: Stored) -> PartStruct:
    """Return where ``stored`` begins, its rows, and the number of its file or -1."""
    if isinstance(stored, FileRows):
        return PartStruct(stored.start, len(stored), stored.file.handle)
    return PartStruct(stored.ctypes.data, len(stored), -1)


def first_fault(futures: Iterable[Future[Any]]) -> BaseException | None:
    """Return what the first of ``futures`` that has failed so far has raised; None where none has."""
    return next((fault for future in futures if future.done() and (fault := future.exception()) is not None), None)


def stored_name(dtypes: Iterable[str]) -> str:
    """The dtype of weights that are stored in ``dtypes``, by safetensors' names. Raises NotLean for what is not
    packed."""
    names = set(dtypes)
    if len(names) != 1 or not names <= _PACKED.keys():
        raise NotLean(f"its weights are stored in {', '.join(sorted(names))}")
    return _PACKED[names.pop()]


class NoKernels(NotLean):
    """Raised where there are no kernels, or none are wanted."""


def _exports() -> Exports:
    try:
        return load_exports()
    except (OSError, ValueError, AttributeError) as error:
        raise NoKernels(f"its kernels cannot be built here ({error})") from error
