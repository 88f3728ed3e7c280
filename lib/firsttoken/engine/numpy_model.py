"""A Llama or Qwen2 decoder by numpy and the kernels alone, which answers one request while torch is being imported.

It computes layer by layer what the fused engine computes, with the same kernels over weights in the same panels, so an
engine can take weights and cache over between two tokens (``torch_behind.py``). A first token waits for the weights,
whose layers are packed and run in the order of the model, and for neither torch nor transformers.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from firsttoken.assets.checkpoint import EMBEDDING, HEAD, ModelFiles
from firsttoken.assets.held import seen
from firsttoken.engine.native.exports import (
    PRODUCTS,
    STORAGE,
    WIDTHS,
    Exports,
    WeightMemory,
    load_exports,
    narrowed,
    widened,
)
from firsttoken.lean.lean_config import LeanConfig, OtherWay, lean_config, scaled_frequencies
from firsttoken.study.errors import LengthError, OutputError, RequestError
from firsttoken.study.system.cgroup_limits import cores

BLOCK_TOKENS = 16  # of the cache
PARTS = 3  # of a product at most, as kernels.cpp has them
POLL_S = 0.001
_READ = {"F32": "float32", "BF16": "bfloat16"}


class _LaidOut(NamedTuple):
    """Weights as the kernels read them: ``fields``, ``panels`` by product, and what else the fields point at."""

    fields: np.ndarray
    panels: dict[str, np.ndarray]
    kept: list[np.ndarray | None]


class NumpyModel:
    """The model of ``files``, computing on ``threads`` cores (all, unless given) for one request.

    That has at most ``context`` tokens, or as many as the model has positions. The weights are read and packed from now
    on, layer by layer, by a thread for each core. It computes in the dtype that they are stored in, but in float32
    where the processor has no instructions for bfloat16.

    Raises OtherWay, in one line, for what it cannot run: another architecture, a stored dtype or a shape that the
    kernels do not have, no compiler, or kernels whose products are wrong here. Raises ModelError as
    :func:`lean_config`.
    """

    def __init__(self, files: ModelFiles, context: int = 4096, threads: int | None = None) -> None:
        self.config = config = lean_config(files.folder)
        self._stored, self._exports = _known(files, config), _exports()
        bf16 = self._stored == "bfloat16" and self._exports.has_bfloat16
        self.dtype = "bfloat16" if bf16 else "float32"
        if not self._exports.multiplies(self.dtype):
            raise OtherWay(f"its {self.dtype} products are wrong on this processor")
        self.files, self.seen = files, seen(files.files)
        self.threads = threads or cores()  # of the calls to come
        self._maps = {file: _mapped(file) for file in files.files}
        self.memory = WeightMemory(huge=False)  # its first token waits for all of it
        self._jobs: list[list[int]] = []  # what the kernel packs, without the interpreter, which is importing meanwhile
        self._sources: list[np.ndarray] = []
        self._head = self._laid_out_head()  # the largest first, so that one thread packs it beside the layers
        self._layers = [self._laid_out_layer(number) for number in range(config.num_hidden_layers)]
        jobs, taken = np.array(self._jobs, np.int64), np.zeros(1, np.int64)
        self._done = np.zeros(len(jobs), np.int64)
        told = ("pack_jobs", jobs, len(jobs), self._stored == "bfloat16", taken, self._done)
        packing = ThreadPoolExecutor(self.threads, "packing")
        self._packing = [packing.submit(self._call, *told) for _ in range(self.threads)]
        packing.shutdown(wait=False)
        self._joined: np.ndarray | None = None  # the fields of all layers
        self.context = min(context, config.max_position_embeddings)
        blocks = -(-self.context // BLOCK_TOKENS)
        kv = (blocks, config.num_hidden_layers, 2, BLOCK_TOKENS, config.num_key_value_heads, config.head_dim)
        self.cache = np.zeros(kv, STORAGE[self.dtype])  # as KVPool has it; its first ``cached`` tokens are written
        self.cached = 0
        self._tables = np.arange(blocks, dtype=np.int64)
        steps = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        self._frequencies = scaled_frequencies(config, steps, np.where).astype(np.float32)

    def wait(self, timeout_s: float) -> None:
        """Wait until all weights are packed, or until ``timeout_s`` is over."""
        wait(self._packing, timeout_s)

    @property
    def _packed(self) -> bool:
        return bool(self._done.all())

    def _wait_for(self, jobs: slice) -> None:
        """Wait until these ``jobs`` are done. Raises what their thread raised."""
        while not self._done[jobs].all():
            if not wait(self._packing, POLL_S).not_done and not self._packed:
                for ended in self._packing:
                    ended.result()

    def next_token(self, tokens: Sequence[int]) -> int:
        """The likeliest token after ``tokens``, which follow those that are cached, and are cached then.

        Raises RequestError for none, or for one outside the vocabulary; LengthError for more than fit; OutputError
        where a logit is no finite number.
        """
        ids = np.array(tokens, dtype=np.int64)
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise RequestError(f"the prompt is empty, or holds no token id of the model's {self.config.vocab_size}")
        if self.cached + len(ids) > self.context:
            raise LengthError(f"{self.cached + len(ids)} tokens do not fit a context of {self.context}; shorten it")
        places = np.arange(self.cached, self.cached + len(ids), dtype=np.int64)
        states, turns = self._rows(ids), self._turns(places)
        for fields in self._ready():
            self._run(fields, states, turns, places)
        self.cached += len(ids)
        logits = self._logits(states[-1:])
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise OutputError("the model's output is no finite number; copy its weights again")
        return best

    def parameter(self, name: str) -> np.ndarray:
        """The tensor called ``name`` in the dtype that computes: a view of the mapped file where that is the stored."""
        found = self._as_stored(name)
        return found if self._stored == self.dtype else widened(found)

    def _as_stored(self, name: str) -> np.ndarray:
        """The tensor called ``name``: a view of the mapped file, or a copy where it begins at an odd place."""
        stored = self.files.tensors[name]
        entry = stored.entry
        found = np.frombuffer(self._maps[stored.file], np.uint8, entry.end - entry.start, entry.start)
        return np.require(found.view(STORAGE[self._stored]).reshape(entry.shape), requirements="A")

    @property
    def small(self) -> list[str]:
        """The names of all parameters that are not packed."""
        packed = {f"{part}.weight" for parts in PRODUCTS.values() for part in parts} | {HEAD}
        return [name for name in self.files.tensors if not any(name.endswith(one) for one in packed)]

    @property
    def panels(self) -> list[dict[str, np.ndarray]]:
        """The packed weights of each layer by product."""
        self._wait_for(slice(1, None))
        return [layer.panels for layer in self._layers]

    @property
    def head(self) -> np.ndarray:
        """The packed weight of the head."""
        self._wait_for(slice(1))
        return self._head.panels["head"]

    def _ready(self) -> Iterator[np.ndarray]:
        """The fields [1, layers, fields] of the layers, one at a time while they are read."""
        if self._joined is not None:
            yield self._joined
            return
        for number, layer in enumerate(self._layers):
            self._wait_for(slice(1 + number * len(PRODUCTS), 1 + (number + 1) * len(PRODUCTS)))
            yield layer.fields[None, None]
        self._joined = np.stack([layer.fields for layer in self._layers])[None]
        self._sources.clear()  # of which those that begin at an odd place were copies

    def _laid_out_layer(self, number: int) -> _LaidOut:
        place = f"model.layers.{number}."
        # mapped where they can be: to read them here would wait for the disk, and let nobody import meanwhile
        norms = [self.parameter(f"{place}{name}_layernorm.weight") for name in ("input", "post_attention")]
        fields, panels = [np.array([number, *(norm.ctypes.data for norm in norms)], dtype=np.int64)], {}
        kept = norms
        for product, parts in PRODUCTS.items():
            biases = [name for part in parts if (name := f"{place}{part}.bias") in self.files.tensors]
            bias = np.concatenate([self.parameter(name) for name in biases]) if biases else None
            names = [f"{place}{part}.weight" for part in parts]
            panels[product], mine = self._to_pack(names, bias, gated=product == "gate_up")
            fields.append(mine)
            kept += [bias, mine]
        return _LaidOut(np.concatenate(fields), panels, kept)

    def _laid_out_head(self) -> _LaidOut:
        norm = self.parameter("model.norm.weight")
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        panels, fields = self._to_pack([name], None, gated=False)
        return _LaidOut(fields, {"head": panels}, [norm])

    def _to_pack(self, names: Sequence[str], bias: np.ndarray | None, *, gated: bool) -> tuple[np.ndarray, np.ndarray]:
        """Room for the weights called ``names`` [outputs, inputs], one below the other, as panels, and the fields that
        name them; a job says that they are to be packed."""
        weights = [self._as_stored(name) for name in names]
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        step = self._exports.panel // 2 if gated else self._exports.panel
        count = -(-(outputs // 2 if gated else outputs) // step)
        panels = self.memory.take(count * self._exports.panel * inputs * np.dtype(STORAGE[self.dtype]).itemsize)
        told = [panels.ctypes.data, 0 if bias is None else bias.ctypes.data, outputs, inputs, gated, *[0] * 5]
        fields = np.array(told, dtype=np.int64)
        parts = [number for weight in weights for number in (weight.ctypes.data, len(weight))]
        self._jobs.append([fields.ctypes.data, *parts, *[0] * (2 * PARTS - len(parts))])
        self._sources += weights
        return panels, fields

    def _run(
        self, fields: np.ndarray, states: np.ndarray, turns: tuple[np.ndarray, np.ndarray], places: np.ndarray
    ) -> None:
        """``states`` [tokens, hidden] through the layers of ``fields``, in place; their keys and values are cached."""
        config, tokens = self.config, len(states)
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        room = config.hidden_size + (2 * heads + 2 * kv_heads) * width + config.intermediate_size
        rooms, works = np.empty(tokens * room, states.dtype), np.zeros(tokens, np.int64)
        seen = (self.cache, self._tables, len(self._tables), works, places + 1)
        sizes = (tokens, kv_heads, width, BLOCK_TOKENS, self.cache[0].size)
        scales = (config.rms_norm_eps, width**-0.5)
        threads = self.threads if self._packed else 1  # the others pack
        self._call(
            "run_layers", fields, 1, None, fields.shape[1], states, *turns, *seen, *sizes, rooms, *scales, threads
        )

    def _logits(self, states: np.ndarray) -> np.ndarray:
        """[vocabulary] in float32 of the last of ``states`` [1, hidden]."""
        normed = np.empty_like(states)
        said = np.empty(self.config.vocab_size, states.dtype)
        sizes = (1, self.config.hidden_size, self.config.rms_norm_eps, self.threads)
        self._wait_for(slice(1))
        self._call("rms_norm", states, self._head.kept[0], normed, *sizes)
        self._call("product", normed, 1, self._head.fields, None, said, self.threads)
        return widened(said)

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        """The embedding's rows of ``ids``, in memory of their own."""
        stored = self.files.tensors[EMBEDDING]
        start, shape = stored.entry.start, stored.entry.shape
        table = np.frombuffer(self._maps[stored.file], np.uint8, stored.entry.end - start, start)
        rows = table.reshape(shape[0], -1)[ids].view(STORAGE[self._stored])
        return rows if self._stored == self.dtype else widened(rows)

    def _turns(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [tokens, head_dim] of positions."""
        angles = places[:, None].astype(np.float32) * self._frequencies
        both = np.concatenate((angles, angles), axis=1)
        return narrowed(np.cos(both), self.dtype), narrowed(np.sin(both), self.dtype)

    def _call(self, name: str, *arguments: Any) -> None:
        self._exports.call(name, self.dtype, *arguments)


def _known(files: ModelFiles, config: LeanConfig) -> str:
    """The dtype that the weights of ``files`` are stored in. Raises OtherWay for what the kernels do not run."""
    dtypes = {stored.entry.dtype for stored in files.tensors.values()}
    if len(dtypes) != 1 or not dtypes <= _READ.keys():
        raise OtherWay(f"its weights are stored in {', '.join(sorted(dtypes))}")
    if config.head_dim not in WIDTHS:
        raise OtherWay(f"its head_dim is {config.head_dim}")
    inputs = config.hidden_size, config.intermediate_size
    if odd := [size for size in inputs if size % 2]:
        raise OtherWay(f"its products have {odd[0]} inputs, an odd number")
    if files.second is not None:
        raise OtherWay("its head is tied to the embedding, and both are stored")
    return _READ[dtypes.pop()]


def _exports() -> Exports:
    try:
        return load_exports()
    except (OSError, AttributeError) as error:
        raise OtherWay(f"its kernels cannot be built here ({error})") from error


def _mapped(file: object) -> mmap.mmap:
    """``file`` mapped so that nothing writes to it; what is written to the map stays there."""
    with open(file, "rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
