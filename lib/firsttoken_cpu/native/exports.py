"""The functions of ``kernels.cpp``, called with addresses: no torch is needed for them, nor imported here."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from firsttoken.study.system.compiled import shared_library

SOURCE = Path(__file__).with_name("kernels.cpp")
WIDTHS = (16, 32, 64, 128)  # of a head: what kernels.cpp is compiled for
STORAGE = {"float32": np.float32, "bfloat16": np.uint16}
"""What an array holds a number of each dtype in: numpy has no bfloat16, whose bits are the upper half of a float's."""

PRODUCTS = {
    "joint": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a fused layer, and the projections that are one product."""

# What kernels.cpp takes: addresses as numbers, so that a struct may be copied, and everything as wide as an address.

_ADDRESS, _COUNT = ctypes.c_uint64, ctypes.c_int64


class AdapterStruct(ctypes.Structure):
    """LoRA's part of a weight: ``a`` [total, inputs], and ``b`` of ``rank`` by halves of panels; total 0: none."""

    _fields_ = (("a", _ADDRESS), ("b", _ADDRESS), ("offsets", _ADDRESS), ("total", _COUNT), ("rank", _COUNT))


class WeightStruct(ctypes.Structure):
    """A weight [outputs, inputs] in panels; of a gated one half of the outputs are gates."""

    _fields_ = (
        ("panels", _ADDRESS),
        ("bias", _ADDRESS),
        ("outputs", _COUNT),
        ("inputs", _COUNT),
        ("gated", _COUNT),
        ("adapter", AdapterStruct),
    )


class LayerStruct(ctypes.Structure):
    """A decoder layer; ``number`` is its place in the pool."""

    _fields_ = (
        ("number", _COUNT),
        ("before_attention", _ADDRESS),
        ("before_mlp", _ADDRESS),
        *((product, WeightStruct) for product in PRODUCTS),
    )


class PagedStruct(ctypes.Structure):
    """A pool of KV blocks, the block ``tables`` [sequences, table_width] of a step, and for each of its tokens the
    index of its sequence, and how many tokens it sees."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("pool", "tables", "sequences", "contexts")),
        *((name, _COUNT) for name in ("table_width", "tokens", "kv_heads", "head_dim", "block_tokens", "block_step")),
    )


PARTS = 3  # of a weight at most, one below the other


class PartStruct(ctypes.Structure):
    """``outputs`` rows as they are stored: at an address, or at a byte of an open file, whose number is ``file``."""

    _fields_ = (("rows", _COUNT), ("outputs", _COUNT), ("file", _COUNT))


class JobStruct(ctypes.Structure):
    """A weight that is to be packed, and its parts; without a weight the numbers of the first part go to the rows of
    the second."""

    _fields_ = (("weight", _ADDRESS), ("parts", PartStruct * PARTS))


_POINTER, _REAL, _THREADS = ctypes.c_void_p, ctypes.c_float, ctypes.c_int
_WEIGHT, _LAYERS, _PAGED, _JOBS = map(ctypes.POINTER, (WeightStruct, LayerStruct, PagedStruct, JobStruct))
FUNCTIONS = {
    "attend": [_POINTER, _COUNT, _PAGED, _POINTER, _COUNT, _COUNT, _REAL, _THREADS],
    "rms_norm": [_POINTER] * 3 + [_COUNT] * 2 + [_REAL, _THREADS],
    "gated": [_POINTER] * 2 + [_COUNT] * 2 + [_THREADS],
    "rotate": [_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _THREADS],
    "largest": [_POINTER] + [_COUNT] * 2 + [_POINTER] * 2 + [_THREADS],
    "pack": [_POINTER, _WEIGHT, _THREADS],
    "pack_jobs": [_JOBS, _COUNT, _COUNT, _POINTER, _POINTER],
    "pack_adapter": [_POINTER, _POINTER, _COUNT, _WEIGHT, _POINTER, _POINTER],
    "product": [_POINTER, _COUNT, _WEIGHT, _POINTER, _POINTER, _THREADS],
    "run_layers": [_LAYERS, _COUNT, _POINTER, _COUNT] + [_POINTER] * 3 + [_PAGED, _POINTER, _REAL, _REAL, _THREADS],
}


class Exports:
    """The functions in the library ``file`` by name and dtype.

    ``panel`` is the number of outputs that lie side by side in a packed weight; bfloat16 is multiplied well where the
    processor ``has_bfloat16`` instructions. Raises OSError, ValueError and AttributeError for a file that is no such
    library.
    """

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        self._calls: dict[tuple[str, str], Callable[..., int | None]] = {}
        for name, arguments in FUNCTIONS.items():
            for dtype in STORAGE:
                address = ctypes.c_void_p.in_dll(library, f"{name}_{dtype}").value
                returned = _COUNT if name == "pack_adapter" else None
                self._calls[name, dtype] = ctypes.CFUNCTYPE(returned, *arguments)(address)
        library.panel_outputs.restype = library.multiplies_bfloat16.restype = _COUNT
        self.panel = library.panel_outputs()
        self.has_bfloat16 = bool(library.multiplies_bfloat16())

    def call(self, name: str, dtype: str, *arguments: Any) -> int | None:
        """Call the function ``name`` for ``dtype`` with the addresses of numpy's arrays and torch's tensors, and with
        structs, numbers, and None, as they are."""
        return self._calls[name, dtype](*map(_address, arguments))

    def multiplies(self, dtype: str) -> bool:
        """Return whether a first product in ``dtype`` is what it must be: of whole numbers that no rounding changes."""
        outputs, inputs = self.panel + 3, 6  # an odd number of outputs, and of rows below, as models have them
        rows = np.arange(outputs * inputs, dtype=np.float32).reshape(outputs, inputs) % 7
        states = np.arange(3 * inputs, dtype=np.float32).reshape(3, inputs) % 5
        stored, factors = narrowed(rows, dtype), narrowed(states, dtype)
        panels, products = np.zeros(2 * self.panel * inputs, stored.dtype), np.zeros((3, outputs), stored.dtype)
        weight = WeightStruct(panels.ctypes.data, 0, outputs, inputs)
        self.call("pack", dtype, stored, weight, 1)
        self.call("product", dtype, factors, 3, weight, None, products, 1)
        return np.array_equal(widened(products), states @ rows.T)


def _address(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


def load_exports() -> Exports:
    """The functions, built at the first call on a machine (seconds) and kept in the cache folder.

    Raises OSError, of one line, without a compiler and where it fails, and as :class:`Exports`.
    """
    file = shared_library(SOURCE)
    if "torch" not in sys.modules:
        _take_the_openmp_of_torch()
    return Exports(file)


def _take_the_openmp_of_torch() -> None:
    """Load the OpenMP runtime that torch brings, so that the kernels' threads are torch's when that comes: of two
    runtimes in a process, each has threads of its own that wait for work on the other's cores."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in (*Path(folder, "lib").glob("libgomp*.so*"), *Path(folder).parent.glob("torch.libs/libgomp*.so*")):
            with suppress(OSError):
                ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
                return


Halves = tuple[np.ndarray, np.ndarray]
"""What LoRA adds to one linear layer: A [rank, in] and B [out, rank] in float32, B already scaled."""


class PackedAdapter(NamedTuple):
    """The ``struct`` of a weight's adapter, and the arrays that it points at."""

    struct: AdapterStruct
    arrays: tuple[np.ndarray, ...]


def packed_adapter(
    exports: Exports, dtype: str, weight: WeightStruct, parts: Sequence[int], halves: Sequence[Halves | None]
) -> PackedAdapter | None:
    """LoRA's correction of a ``weight`` of ``dtype``: its ``parts`` are the outputs of the linear layers that it is
    made of, each of which has ``halves`` or None.

    None where the kernels cannot: where the outputs of two of the linear layers share half a panel.
    """
    pairs = [pair for pair in halves if pair is not None]
    rank = max(len(a) for a, _ in pairs)
    b = np.zeros((sum(parts), rank), np.float32)
    offsets = np.empty(len(b), np.int64)
    output = offset = 0
    for outputs, pair in zip(parts, halves, strict=True):
        offsets[output : output + outputs] = offset
        if pair is not None:
            b[output : output + outputs, : len(pair[0])] = pair[1]
            offset += len(pair[0])
        output += outputs
    most = 2 * (len(b) // exports.panel + 2)  # halves of panels, as many as a gated weight can have, too
    packed, starts = np.zeros(most * rank * exports.panel // 2, np.float32), np.zeros(most, np.int64)
    if not exports.call("pack_adapter", dtype, b, offsets, rank, weight, packed, starts):
        return None
    # every output reads rank numbers from its offset on, one whose adapter is smaller and one that has none, too
    a = np.zeros((int(offsets.max()) + rank, pairs[0][0].shape[1]), np.float32)
    a[: sum(len(pair[0]) for pair in pairs)] = np.concatenate([pair[0] for pair in pairs])
    struct = AdapterStruct(a.ctypes.data, packed.ctypes.data, starts.ctypes.data, len(a), rank)
    return PackedAdapter(struct, (a, packed, starts))


def narrowed(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """float32 ``numbers``, none a NaN, in the ``STORAGE`` of ``dtype``, rounded to the nearest, ties to even."""
    if dtype == "float32":
        return numbers
    bits = numbers.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def widened(numbers: np.ndarray) -> np.ndarray:
    """``numbers`` of any ``STORAGE`` in float32."""
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32) if numbers.dtype == np.uint16 else numbers


_HUGE = 2**21  # bytes of a huge page on x86-64
_CHUNK = 16 * _HUGE
_LINE = 64
_MADV_COLLAPSE = 25  # Python 3.11 has no name for it


class WeightMemory:
    """Memory for weights, one behind the other, on ``huge`` pages where the system has them: every step reads all of
    it, and of small pages each 4 KiB cost a walk through the page table.

    A huge page is cleared as a whole before its first number is written, which leaves the caches meanwhile: a start
    whose first token waits for the last weight has it sooner without. SmolLM2-135M in bf16, two cores of an AMD EPYC:
    steps of 16 requests take 9.2 ms on huge pages and 9.6 on small ones, a start without torch 0.39 s and 0.29 s.
    """

    def __init__(self, huge: bool) -> None:
        self._huge = huge
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)
        self._mapped: WeakSet[mmap.mmap] = WeakSet()  # each goes with the last weight in it

    def allocate(self, size: int) -> np.ndarray:
        """``size`` bytes of zeros, which begin at a line of the cache."""
        needed = -(-size // _LINE) * _LINE
        with self._lock:  # layers are packed by the thread that loads them
            if needed > len(self._rest):
                self._rest = self._zeros(max(needed, _CHUNK))
            taken, self._rest = self._rest[:size], self._rest[needed:]
        return taken

    def collapse(self) -> None:
        """Put what is on small pages onto huge ones, a page at a time, while others read it: 269 MB in 0.7 s. Does
        nothing where the system cannot (Linux can from 6.1 on)."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        for memory in list(self._mapped):
            first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE
            for start in range(first, len(memory) - _HUGE + 1, _HUGE):
                try:
                    memory.madvise(_MADV_COLLAPSE, start, _HUGE)
                except OSError:
                    return

    def _zeros(self, size: int) -> np.ndarray:
        # Private: in shared memory, Python's default, copies of the process would write, too, and it has no huge pages.
        memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._huge and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            with suppress(OSError):  # a kernel that was built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._mapped.add(memory)
        buffer = np.frombuffer(memory, np.uint8)
        return buffer[-buffer.ctypes.data % _HUGE :][:size]


_PANELS = WeightMemory(huge=True)
_OTHER: ContextVar[WeightMemory | None] = ContextVar("_OTHER", default=None)


def panel_memory() -> WeightMemory:
    """The memory of all weights that torch packs in a process, but those that are :func:`packed_in` another."""
    return _OTHER.get() or _PANELS


@contextmanager
def packed_in(memory: WeightMemory) -> Iterator[None]:
    """Within the block this thread packs weights in ``memory``."""
    before = _OTHER.set(memory)
    try:
        yield
    finally:
        _OTHER.reset(before)
