"""The costs of a real GPU: operator times profiled inside vLLM, as casys-kaist/LLMServingSim publishes them.

A profile is a folder: ``attention.csv`` (microseconds of one layer's attention over the prefill's chunk and cached
prefix, the decoding requests and their context), ``dense.csv`` (every other operator, by the tokens of the batch),
``per_sequence.csv`` (head and sampler, by the sequences), ``meta.yaml``, and ``skew_fit.csv`` where uneven decode
batches were measured too. The tables lie in the folder itself, or in its ``tp1`` (one GPU). Those of more GPUs are not
read: what the GPUs exchange is in no profile. Nor is a mixture of experts: its layers take as long as its routing says.
What a profile is of is known by a list: the architecture in ``meta.yaml``, and the operators of a layer.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.engine.costs.cost_model import Costs, follow, line_through
from firsttoken.simulation.costs.tables import MEND, number, rows
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.parsing.csv_text import columns, numbered
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, shown
from firsttoken.study.parsing.schema import parse_as
from firsttoken.study.parsing.yaml_text import read_yaml

# Attention as profiled: measurements at four coordinates, made a whole grid that lines can be drawn on.

GRID = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_MOST_CELLS = 10**7  # of the grid: 80 MB; the RTX 4090's has 12,960


def attention_grid(path: Path) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
    """The axes, and microseconds [chunks, prefixes, decodes, contexts]."""
    points: dict[tuple[int, ...], float] = {}
    for line, row in rows(path, (*GRID, "time_us")):
        point = tuple(int(number(path, line, row, name)) for name in GRID)
        if point in points:
            raise CorpusError(f"{path}, line {line}: the point {point} is there twice; {MEND}")
        points[point] = number(path, line, row, "time_us")
    axes = tuple(tuple(sorted({0, *(point[axis_index] for point in points)})) for axis_index in range(len(GRID)))
    if short := [name for name, axis in zip(GRID, axes, strict=True) if len(axis) < 3]:
        raise CorpusError(f"{path}: {', '.join(short)} has fewer than two points above 0; {MEND}")
    if (cells := math.prod(map(len, axes))) > _MOST_CELLS:
        raise CorpusError(
            f"{path}: its {len(points):,} points lie on no grid, one of {cells:,} would hold them; {MEND}"
        )
    grid = np.full([len(axis) for axis in axes], np.nan)
    for point, microseconds in points.items():
        grid[tuple(axis.index(value) for axis, value in zip(axes, point, strict=True))] = microseconds
    _fill(path, axes, grid)
    return axes, grid


def _fill(path: Path, axes: tuple[tuple[int, ...], ...], grid: np.ndarray) -> None:
    """Set what cannot be (no decodes at a context, no prefill at a prefix) to 0, what lies between two grids to a line
    of what was measured, and what the GPU could not hold (the most decodes beside a prefill, or at a long context) to
    the line through the two points before it."""
    between = _between_grids(grid)
    grid[0, 1:] = grid[:, :, 0, 1:] = grid[:, :, 1:, 0] = grid[0, 0, 0, 0] = 0.0
    while (wanted := between & np.isnan(grid)).any() and _join(axes, grid, wanted):
        pass  # points of which two coordinates are foreign need those of which one is
    for hole in map(tuple, np.argwhere(np.isnan(grid))):
        for axis_index in (2, 3):
            coordinate, axis = hole[axis_index], axes[axis_index]
            before = (
                [grid[(*hole[:axis_index], coordinate - back, *hole[axis_index + 1 :])] for back in (1, 2)]
                if coordinate >= 3
                else [np.nan]
            )
            if not np.isnan(before).any():
                slope = (before[0] - before[1]) / (axis[coordinate - 1] - axis[coordinate - 2])
                grid[hole] = max(0.0, before[0] + slope * (axis[coordinate] - axis[coordinate - 1]))
                break
        else:
            point = {name: axis[i] for name, axis, i in zip(GRID, axes, hole, strict=True)}
            raise CorpusError(f"{path}: there is no measurement at {point}; {MEND}")


def _between_grids(grid: np.ndarray) -> np.ndarray:
    """Mark points [chunks, prefixes, decodes, contexts] with coordinates of different grids: no measurement has both.

    A published table may be the union of a coarse grid and a finer one. A point that is missing from its own grid is
    none of these: each two of its coordinates stand together somewhere.
    """
    measured, apart = ~np.isnan(grid), np.zeros(grid.shape, bool)
    for fixed_axes in combinations(range(grid.ndim), 2):
        others = tuple(axis_index for axis_index in range(grid.ndim) if axis_index not in fixed_axes)
        apart |= ~measured.any(others, keepdims=True)
    return apart


def _join(axes: tuple[tuple[int, ...], ...], grid: np.ndarray, wanted: np.ndarray) -> bool:
    """Set ``wanted`` points that have known ones on both sides along an axis to the straight line between the two; of
    several axes to that on which these are nearest to each other, by their ratio. 0 is a point of its own. Returns
    whether any was set."""
    measured, nearest = grid.copy(), np.full(grid.shape, np.inf)
    for axis_index, axis in enumerate(axes):
        positions = np.array(axis, dtype=float)
        lines, filled, near = (np.moveaxis(array, axis_index, -1) for array in (measured, grid, nearest))
        for line in map(tuple, np.argwhere(np.moveaxis(wanted, axis_index, -1).any(-1))):
            measured_indices = np.flatnonzero(~np.isnan(lines[line]) & (positions > 0))
            for hole in np.flatnonzero(np.moveaxis(wanted, axis_index, -1)[line]) if len(measured_indices) > 1 else ():
                right = int(np.searchsorted(measured_indices, hole))
                if not 0 < right < len(measured_indices):
                    continue
                low, high = measured_indices[right - 1], measured_indices[right]
                if (ratio := positions[high] / positions[low]) < near[line][hole]:
                    near[line][hole] = ratio
                    share = (positions[hole] - positions[low]) / (positions[high] - positions[low])
                    filled[line][hole] = lines[line][low] * (1 - share) + lines[line][high] * share
    return bool(np.isfinite(nearest).any())


# How much longer attention takes where the decoding requests of a batch are unevenly long, as profiled.

_LABEL = re.compile(r"[A-Za-z]+(<=|=|>)(\d+)(k|%)?")
_UNIT = {"k": 1024.0, "%": 0.01, None: 1.0}
LABELS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")


@dataclass(frozen=True)
class AttentionSkew:
    """The place of an uneven batch between one at its mean context (0) and one at its longest (1), by bucket.

    ``shares`` are keyed by the upper ends of the buckets: prefill chunk, decodes, evenness, longest context, prefix.
    ``otherwise`` is the mean over the samples, for a bucket that was not measured.
    """

    shares: dict[tuple[float, ...], float]
    ends: tuple[tuple[float, ...], ...]
    otherwise: float

    @classmethod
    def read(cls, path: Path) -> AttentionSkew:
        """The table that a profile brings. Raises CorpusError naming file, line and mend."""
        shares: dict[tuple[float, ...], float] = {}
        samples = total = 0.0
        for line, row in rows(path, ("pc", *LABELS, "alpha", "n_samples")):
            key = (number(path, line, row, "pc"), *(_end(path, line, row[name]) for name in LABELS))
            if key in shares:
                raise CorpusError(f"{path}, line {line}: this bucket is there twice; {MEND}")
            shares[key] = number(path, line, row, "alpha", least=-math.inf)
            weight = number(path, line, row, "n_samples")
            samples, total = samples + weight, total + weight * shares[key]
        edges = tuple(tuple(sorted({key[column] for key in shares})) for column in range(1 + len(LABELS)))
        return cls(shares, edges, total / samples if samples else 0.0)

    def share(self, chunk: float, prefix: float, decodes: int, longest: int, evenness: float) -> float:
        """The share for a batch; ``evenness`` is (mean - least) / (longest - least) of its contexts."""
        near = _nearest(self.ends[0], chunk)
        rest = zip(self.ends[1:], (decodes, evenness, longest, prefix), strict=True)
        key = (near, *(edges[min(bisect_left(edges, value), len(edges) - 1)] for edges, value in rest))
        return self.shares.get(key, self.otherwise)


@lru_cache(maxsize=4096)  # steps that prefill nothing, or a full budget, are most
def _nearest(chunks: tuple[float, ...], chunk: float) -> float:
    """Return the one of ``chunks`` that is nearest to ``chunk`` by their ratio."""
    return min(chunks, key=lambda candidate: abs(math.log2(1 + candidate) - math.log2(1 + chunk)))


def _end(path: Path, line: int, label: str) -> float:
    """The upper end of a bucket: 128 of "n<=128", 0 of "kp=0", infinity of "sr>70%"."""
    match = _LABEL.fullmatch(label or "")
    if match is None:
        raise CorpusError(f"{path}, line {line}: {label!r} is no bucket such as n<=128; {MEND}")
    sign, digits, unit = match.groups()
    return math.inf if sign == ">" else float(digits) * _UNIT[unit]


ONCE, TWICE = frozenset({"embedding", "final_layernorm"}), frozenset({"layernorm"})  # of a pass, and of a layer
MOST_TOKENS = 1 << 14  # tokens of a batch that the tables are kept for; beyond it they go on as they end
_DEGREE = re.compile(r"tp\d+")  # the folder of the tables for so many GPUs
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_LAYER = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "act_fn", "down_proj"}) | TWICE
_KNOWN = _LAYER | ONCE | {"rotary_emb", "qk_norm"}
_OTHERS = {  # a file that others lay beside or in place of the tables, and what it says
    "moe.csv": "a mixture of experts is not simulated; take a profile of a dense model",
    "linear_attention.csv": "linear attention is not simulated; take a profile of full attention",
    "layers.csv": "an older profiler (v0) wrote it, whose tables are not read; profile it again",
    "mlp.csv": "a profile of vidur is not read; take one of LLMServingSim",
}
_MORE_GPUS = "a profile of several GPUs lacks the time of what they exchange: take one of tp1"


@dataclass(frozen=True)
class ProfiledCosts(Costs):
    """A step of a model of ``layers`` layers as its operators took on the GPU, one after the other.

    Between the points every table is a straight line; beyond them goes on what it did over their upper half, as kernels
    take the same time over a tile's width of tokens. A prefill longer than any that was profiled has the attention of
    its pieces. Several prompts in a step count as one of the same tokens and the same query-key pairs; decodes as so
    many at their mean context, moved towards the longest by what the profile measured of uneven batches. Time that the
    host takes between two steps is not in a profile (vLLM 0.19 schedules ahead, so that little is left). ``swap``
    charges moves of keys and values, by default not at all: vLLM recomputes.
    """

    layers: int
    once: tuple[float, ...]  # [tokens]: seconds of everything but attention and head, all layers
    heads: tuple[float, ...]  # [sequences]: seconds of head and sampler
    axes: tuple[tuple[int, ...], ...]  # of the attention grid
    grid: np.ndarray  # [chunks, prefixes, decodes, contexts]: seconds of all layers' attention
    skew: AttentionSkew | None
    keyed_by_middle: bool  # the prefix axis counts half of the chunk itself
    sha256: str  # of the files read

    @classmethod
    def read(cls, folder: str | Path, layers: int, gpus: int | None = None) -> ProfiledCosts:
        """The profile in ``folder``, for ``layers`` layers; of one of ``gpus``, where neither its name nor meta.yaml
        says of how many. What several exchange is the caller's to add.

        Raises CorpusError naming file, line and mend for a file or column that is missing, a value that is no number
        or negative, a point that is there twice or out of order, a grid with a hole that nothing beside it fills, and
        ProfileError for less than one layer.
        """
        if layers < 1:
            raise ProfileError(f"profiled costs: a model has at least 1 layer, not {layers}")
        folder, tables = _located(Path(folder).expanduser())
        with errors_as(folder / "meta.yaml", CorpusError, MEND):
            meta = parse_as(_Meta, read_yaml(folder / "meta.yaml"), others=True)
            if meta.architecture not in _ARCHITECTURES:
                raise ParseError(
                    f"architecture: the layers of {shown(meta.architecture)} are not known; known: "
                    f"{', '.join(_ARCHITECTURES)}"
                )
            if not gpus and tables.name != "tp1" and meta.tp_degrees != (1,):
                raise ParseError(
                    "tp_degrees: the tables may be of more than one GPU; put those of one into a folder tp1"
                )
        dense = _by_layer(tables / "dense.csv", "tokens")
        heads = _by_layer(tables / "per_sequence.csv", "sequences")
        if differing := dense.keys() - _KNOWN | _LAYER - dense.keys():
            name, which = min(differing), "is not known" if min(differing) in dense else "lacks"
            raise CorpusError(
                f"{tables / 'dense.csv'}: {name[:40]} {which}; take a profile of a dense model of full attention"
            )
        axes, grid = attention_grid(tables / "attention.csv")
        per_pass = sum(_line(dense[name], MOST_TOKENS) for name in sorted(ONCE & dense.keys()))
        of_layers = {name: points for name, points in dense.items() if name not in ONCE}
        per_layer = sum(_line(points, MOST_TOKENS) * (1 + (name in TWICE)) for name, points in of_layers.items())
        head = sum(_line(points, 1024) for points in heads.values())
        names = ("attention.csv", "dense.csv", "per_sequence.csv")
        digest = hashlib.sha256(b"".join((tables / name).read_bytes() for name in names))
        fitted = meta.skew_fit is not None and meta.skew_fit.enabled
        keyed = "prefill_key" in str((meta.attention_grid or {}).get("axes", ""))
        return cls(
            layers,
            tuple(((per_pass + layers * per_layer) * 1e-6).tolist()),
            tuple((head * 1e-6).tolist()),
            axes,
            grid * layers * 1e-6,
            AttentionSkew.read(tables / "skew_fit.csv") if fitted else None,
            keyed,
            digest.hexdigest(),
        )

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        tokens = sum(new for _, new in prefills) + len(contexts)
        if not tokens:
            return 0.0
        return (
            follow(self.once, tokens)
            + follow(self.heads, len(prefills) + len(contexts))
            + self._attention_s(prefills, contexts)
        )

    def swap_out_s(self, tokens: int) -> float:
        raise ProfileError(
            "profiled costs: no profile holds the price of a swap; preempt by recompute, or give the link's own costs"
        )

    swap_in_s = swap_out_s

    def _attention_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        before, chunk, prefix = self._last_piece(*self._as_one(prefills))
        count = len(contexts)
        mean = sum(contexts) / count if count else 0.0
        at_mean = before + self._lookup(chunk, prefix, count, mean)
        if self.skew is None or count < 2 or (most := max(contexts)) == (least := min(contexts)):
            return at_mean
        share = self.skew.share(chunk, prefix, count, most, (mean - least) / (most - least))
        return at_mean + share * (before + self._lookup(chunk, prefix, count, most) - at_mean)

    def _last_piece(self, tokens: float, prefix: float) -> tuple[float, float, float]:
        """A prefill as pieces that the profile has: seconds of all but the last, then (tokens, prefix) of that one."""
        longest, seconds = self.axes[0][-1], 0.0
        if tokens <= longest:
            return seconds, tokens, prefix
        cached = round(prefix - tokens / 2, 3) if self.keyed_by_middle else prefix
        while tokens > longest:
            seconds += self._lookup(longest, self._key(cached, longest, prefix), 0, 0.0)
            tokens, cached = tokens - longest, cached + longest if cached >= 0 else cached
        return seconds, tokens, self._key(cached, tokens, prefix)

    def _key(self, cached: float, tokens: float, prefix: float) -> float:
        """Return the place on the prefix axis of a piece of ``tokens`` behind ``cached`` ones. That is ``prefix`` where
        ``cached`` is below 0, as for many short prompts counted as one, which are behind nothing."""
        if cached < 0:
            return prefix
        return cached + tokens / 2 if self.keyed_by_middle else cached

    def _as_one(self, prefills: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """(tokens, prefix) of one prefill that has the query-key pairs of all."""
        tokens = sum(new for _, new in prefills)
        pairs = sum(new * (cached + new / 2) for cached, new in prefills)
        if not tokens:
            return 0.0, 0.0
        if self.keyed_by_middle:
            return tokens, pairs / tokens
        prefix = pairs / tokens - tokens / 2
        return (tokens, prefix) if prefix >= 0 else (math.sqrt(2 * pairs), 0.0)

    def _lookup(self, *point: float) -> float:
        chunks, prefixes, decodes, contexts = map(_bracket, self.axes, point)
        value_at, interpolated = self.grid.item, 0.0
        for a, p in chunks:
            for b, q in prefixes:
                for c, r in decodes:
                    for d, s in contexts:
                        interpolated += value_at(a, b, c, d) * p * q * r * s
        return interpolated


def _bracket(axis: Sequence[int], value: float) -> tuple[tuple[int, float], ...]:
    """(index, weight) of the points around ``value``; 0 is a point of its own ("none"), not the start of a line."""
    if value <= 0:
        return ((0, 1.0),)
    if value <= axis[1]:
        return ((1, 1.0),)
    right = min(bisect_left(axis, value), len(axis) - 1)
    if axis[right] == value:
        return ((right, 1.0),)
    weight = (value - axis[right - 1]) / (axis[right] - axis[right - 1])
    return (right - 1, 1 - weight), (right, weight)


def _located(folder: Path) -> tuple[Path, Path]:
    """The folder of ``meta.yaml`` and that of the tables. Raises CorpusError for tables that cannot be used."""
    degrees = sorted(path.name for path in folder.glob("tp*") if path.is_dir())
    tables = folder / "tp1" if "tp1" in degrees else folder
    if _DEGREE.fullmatch(folder.name) and not (folder / "meta.yaml").exists():
        folder = folder.parent
    if degrees and tables == folder:
        raise CorpusError(f"{folder} has {', '.join(degrees)} and no tp1; {_MORE_GPUS}")
    if _DEGREE.fullmatch(tables.name) and tables.name != "tp1":
        raise CorpusError(f"{tables} is of {tables.name[2:]} GPUs; {_MORE_GPUS}")
    if name := next((name for name in _OTHERS if (tables / name).exists()), ""):
        raise CorpusError(f"{tables / name}: {_OTHERS[name]}")
    if (tables / "attention.csv").exists():
        with errors_as(tables / "attention.csv", CorpusError, MEND):
            if {"prefill_chunk_size", "is_prefill"} & set(columns(*next(numbered(tables / "attention.csv"), (1, "")))):
                raise ParseError(
                    "an older profiler (v0) wrote it, which measured prompts and decodes apart, never together"
                )
    return folder, tables


def _line(points: Mapping[int, float], most: int) -> np.ndarray:
    return np.array(line_through(points, most))


@dataclass(frozen=True)
class _SkewFit:
    enabled: bool = False


@dataclass(frozen=True)
class _Meta:
    architecture: str = ""
    tp_degrees: tuple[int, ...] = ()
    skew_fit: _SkewFit | None = None
    attention_grid: dict[str, Any] | None = None


def _by_layer(path: Path, by: str) -> dict[str, dict[int, float]]:
    """Microseconds by operator and ``by``, ascending."""
    tables: dict[str, dict[int, float]] = {}
    for line, row in rows(path, ("layer", by, "time_us")):
        table, size = tables.setdefault(row["layer"], {}), int(number(path, line, row, by, least=1))
        if table and size <= next(reversed(table)):
            raise CorpusError(
                f"{path}, line {line}: {row['layer']} at {size} {by} is out of order or there twice; {MEND}"
            )
        table[size] = number(path, line, row, "time_us")
    return tables
