"""Operator times of a GPU, as the wheel aiconfigurator-core publishes them: matrix products, attention, all-reduces.

Every table holds times that its authors measured on the card, kernel by kernel, with the framework's own kernels.
They are read from the members that ``env/assets.yaml`` pins; nothing of the wheel is installed or run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.assets.lock import asset_path, load_lock
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.parsing.parse_errors import ParseError, errors_as
from firsttoken.study.parsing.schema import parse_as
from firsttoken.study.parsing.yaml_text import read_yaml

CARDS = ("a100-sxm", "h100-sxm", "h200-sxm", "l40s", "b200-sxm", "rtx-pro-6000")
"""The cards whose tables are pinned."""

PRODUCTS, CONTEXT, GENERATION, ALL_REDUCE, NCCL = "gemm", "context", "generation", "all-reduce", "nccl"
_COLUMNS = {
    PRODUCTS: ("gemm_dtype", "m", "n", "k"),
    CONTEXT: ("num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "window_size", "batch_size", "isl"),
    GENERATION: ("num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "window_size", "batch_size", "step"),
    ALL_REDUCE: ("num_gpus", "backend", "message_size"),
    NCCL: ("op_name", "num_gpus", "nccl_dtype", "message_size"),
}
_OPTIONAL = {"window_size": 0}  # a column that older tables lack, and what it would hold
_MEND = "delete it and run `firsttoken fetch`"
_HALF_BYTES = 2  # NCCL's message sizes are counted in elements
_DISTURBED = 1.25  # with 1.5 the errors of 67 server runs (notebook 46) have their median and p90 within half a point
Curve = tuple[np.ndarray, np.ndarray]
"""Sizes, ascending, and seconds at them."""


def power_between(sizes: np.ndarray, curve: Curve) -> np.ndarray:
    """The values at ``sizes`` of ``curve``, all above 0: a power of the size between two of its points, in proportion
    beyond the last, as the first below it."""
    knots, values = curve
    interpolated = np.exp(np.interp(np.log(sizes), np.log(knots), np.log(values)))
    return np.asarray(interpolated * np.maximum(1.0, sizes / knots[-1]))


def least_by_size(sizes: np.ndarray, seconds: np.ndarray) -> Curve:
    """The least time at each size: a shape that was measured by several kernels is computed by the fastest. Times that
    were disturbed are replaced, as :func:`undisturbed` has it."""
    distinct, inverse = np.unique(sizes, return_inverse=True)
    least = np.full(len(distinct), np.inf)
    np.minimum.at(least, inverse, seconds)
    return distinct.astype(float), undisturbed(least)


def undisturbed(seconds: np.ndarray) -> np.ndarray:
    """``seconds`` [sizes, ...], sizes ascending, where a time that is a quarter above that of a larger size is replaced
    by the latter: the kernel could have computed the larger size, and thrown away what is over. Infinite ones, which
    were not measured, stay.

    So it is for 13 % of the products in 8 bits of the B200, in whose table one row can take twice as long as eight, and
    for 1 to 5 % of the other cards'.
    """
    larger = np.minimum.accumulate(seconds[::-1])[::-1]
    return np.where(np.isfinite(seconds) & (seconds > _DISTURBED * larger), larger, seconds)


def tables_from() -> str:
    """The package and version that the tables are from, as they are pinned."""
    return next(asset.pin for asset in load_lock() if asset.name == "gpu-operators")


@dataclass(frozen=True)
class _StatedGpu:
    mem_bw: float
    mem_bw_empirical_scaling_factor: float
    mem_empirical_constant_latency: float
    mem_capacity: float


@dataclass(frozen=True)
class _StatedNode:
    pcie_bw: float


@dataclass(frozen=True)
class _StatedCard:
    gpu: _StatedGpu
    node: _StatedNode


@dataclass(frozen=True)
class OperatorTables:
    """The tables of one card.

    ``memory_bytes_s`` and ``kernel_s`` are what the wheel states for kernels that it did not measure: the rate that
    element-wise kernels reach, and the least that one takes.
    """

    card: str
    memory_bytes: float
    memory_bytes_s: float
    kernel_s: float
    pcie_bytes_s: float
    tables: Mapping[str, Mapping[str, np.ndarray]]

    @classmethod
    def read(cls, card: str) -> OperatorTables:
        """The tables of ``card``. Raises ProfileError for a card that is not pinned, AssetError for tables that are not
        in the cache, CorpusError for a table that cannot be read."""
        if card not in CARDS:
            raise ProfileError(f"no operators of {card!r} are pinned; known: {', '.join(CARDS)}")
        return _read(card)

    def product(self, dtype: str, n: int, k: int) -> tuple[Curve, bool]:
        """Seconds of a product [m, k] x [k, n] by m; and whether n or k lies beyond the table.

        Between the measured n and k the time is a power of both; beyond them it grows in proportion.
        """
        grid = _products_of(self.card, dtype)
        log = np.zeros(len(grid.m))
        for i, share_n in _bracket(grid.n, n):
            for j, share_k in _bracket(grid.k, k):
                log = log + share_n * share_k * grid.log_s[:, i, j]
        beyond = max(1.0, n / grid.n[-1]) * max(1.0, k / grid.k[-1])
        measured = np.isfinite(log)
        return (grid.m[measured], np.exp(log[measured]) * beyond), beyond > 1

    def attention(self, kind: str, heads: int, kv_heads: int, head_dim: int, kv: str) -> dict[int, Curve]:
        """Seconds of a layer's attention by batch: of ``CONTEXT`` by tokens of each prompt, of ``GENERATION`` by those
        in the cache. Heads between two that were measured lie on a line. Raises ProfileError for what no table has."""
        table = self.tables[kind]
        fits = (table["head_dim"] == head_dim) & (table["kv_cache_dtype"] == kv) & (table["window_size"] == 0)
        fits &= table["num_key_value_heads"] == kv_heads
        measured = np.unique(table["num_heads"][fits])
        if not len(measured) or not measured[0] <= heads <= measured[-1]:
            numbers = ", ".join(map(str, measured))
            measurements = f"with these it has {numbers} heads" if numbers else "it has none with these"
            raise ProfileError(
                f"{self.card} has no {kind} attention of {heads} heads, {kv_heads} of keys and values, {head_dim} "
                f"wide, over a {kv} cache; {measurements}"
            )
        sizes = "isl" if kind == CONTEXT else "step"
        neighbours = [
            (_by_batch(table, fits & (table["num_heads"] == measured[i]), sizes), weight)
            for i, weight in _weights(measured.astype(float), float(heads))
        ]
        first = neighbours[0][0]
        if len(neighbours) == 1:
            return first
        (low, low_s), (high, high_s) = neighbours
        return {
            batch: (both, low_s * np.interp(both, *low[batch]) + high_s * np.interp(both, *high[batch]))
            for batch in low.keys() & high.keys()
            if len(both := np.intersect1d(low[batch][0], high[batch][0]))
        }

    def all_reduce(self, gpus: int) -> Curve:
        """Seconds of an all-reduce among ``gpus`` by bytes: vLLM's own kernel in a CUDA graph, or NCCL where that is
        faster. Raises ProfileError for a number of GPUs that was not measured."""
        custom, nccl = self.tables[ALL_REDUCE], self.tables[NCCL]
        matching = (custom["num_gpus"] == gpus) & (custom["backend"] == "vllm_graph")
        theirs = (nccl["num_gpus"] == gpus) & (nccl["op_name"] == "all_reduce") & (nccl["nccl_dtype"] == "half")
        if not matching.any() or not theirs.any():
            sizes_of_groups = np.unique(custom["num_gpus"])
            raise ProfileError(
                f"{self.card} has no all-reduce of {gpus} GPUs; measured: {', '.join(map(str, sizes_of_groups))}"
            )
        sizes, seconds = least_by_size(custom["message_size"][matching], custom["latency"][matching])
        counts, others = least_by_size(nccl["message_size"][theirs], nccl["latency"][theirs])
        return sizes, np.minimum(seconds, np.interp(sizes, counts * _HALF_BYTES, others, left=np.inf))


@dataclass(frozen=True)
class _Products:
    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    log_s: np.ndarray  # [m, n, k]; not a number where none was measured


@lru_cache(maxsize=8)
def _read(card: str) -> OperatorTables:
    path = asset_path(f"{card}.yaml")
    with errors_as(path, CorpusError, _MEND):
        stated = parse_as(_StatedCard, read_yaml(path), others=True)
    tables = {kind: read_table(asset_path(f"{card}-{kind}.parquet"), names) for kind, names in _COLUMNS.items()}
    gpu = stated.gpu
    rate = gpu.mem_bw * gpu.mem_bw_empirical_scaling_factor
    return OperatorTables(card, gpu.mem_capacity, rate, gpu.mem_empirical_constant_latency, stated.node.pcie_bw, tables)


def read_table(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The columns ``names`` of a Parquet table, and ``latency`` in seconds.

    Raises CorpusError for a file that is cut off or no Parquet, that lacks a column, or whose latency is not above 0.
    """
    import pyarrow  # not at module level: a bare GPU machine simulates nothing
    from pyarrow import parquet

    with errors_as(path, CorpusError, _MEND):
        try:
            table = parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ParseError(f"is no whole Parquet table ({str(error).splitlines()[0][:100]})") from error
        present = {*table.column_names, *_OPTIONAL}
        if missing := [name for name in (*names, "latency") if name not in present]:
            raise ParseError(f"has no column {', '.join(missing)}")
        arrays: dict[str, Any] = {
            name: np.array(table.column(name).to_pylist())
            if name in table.column_names
            else np.full(table.num_rows, _OPTIONAL[name])
            for name in names
        }
        milliseconds = table.column("latency").to_numpy().astype(float)
        if not len(milliseconds) or not (milliseconds > 0).all():
            raise ParseError("latency must be above 0 in every row, and there must be one")
    return arrays | {"latency": milliseconds / 1e3}


@lru_cache(maxsize=32)
def _products_of(card: str, dtype: str) -> _Products:
    table = _read(card).tables[PRODUCTS]
    fits = table["gemm_dtype"] == dtype
    if not fits.any():
        dtypes = ", ".join(sorted(set(table["gemm_dtype"].tolist())))
        raise ProfileError(f"{card} has no products of {dtype}; measured: {dtypes}")
    axes = [np.unique(table[name][fits]) for name in ("m", "n", "k")]
    places = [np.searchsorted(axis, table[name][fits]) for axis, name in zip(axes, ("m", "n", "k"), strict=True)]
    least = np.full([len(axis) for axis in axes], np.inf)
    np.minimum.at(least, tuple(places), table["latency"][fits])
    least = undisturbed(least)
    with np.errstate(invalid="ignore"):
        return _Products(*axes, np.where(np.isfinite(least), np.log(least), np.nan))


def _by_batch(table: Mapping[str, np.ndarray], fits: np.ndarray, sizes: str) -> dict[int, Curve]:
    batches = table["batch_size"]
    return {
        int(batch): least_by_size(table[sizes][same_batch], table["latency"][same_batch])
        for batch in np.unique(batches[fits])
        if (same_batch := fits & (batches == batch)).any()
    }


def _bracket(axis: np.ndarray, value: float) -> list[tuple[int, float]]:
    """(index, weight) around ``value`` on a logarithmic axis; the last point beyond its end, the first below it."""
    return _weights(np.log(axis), float(np.log(min(max(value, axis[0]), axis[-1]))))


def _weights(axis: np.ndarray, value: float) -> list[tuple[int, float]]:
    right = min(bisect_left(axis.tolist(), value), len(axis) - 1)
    if axis[right] == value or right == 0:
        return [(right, 1.0)]
    share = (value - axis[right - 1]) / (axis[right] - axis[right - 1])
    return [(right - 1, 1 - share), (right, share)]
