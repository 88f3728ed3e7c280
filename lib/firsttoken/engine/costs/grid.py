"""Attention as profiled: measurements at four coordinates, made a whole grid that lines can be drawn on."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import numpy as np

from firsttoken.engine.costs.tables import MEND, number, rows
from firsttoken.study.errors import CorpusError

GRID = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_MOST_CELLS = 10**7  # of the grid: 80 MB; the RTX 4090's has 12,960


def attention_grid(path: Path) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
    """The axes, and microseconds [chunks, prefixes, decodes, contexts]."""
    points: dict[tuple[int, ...], float] = {}
    for line, row in rows(path, (*GRID, "time_us")):
        at = tuple(int(number(path, line, row, name)) for name in GRID)
        if at in points:
            raise CorpusError(f"{path}, line {line}: the point {at} is there twice; {MEND}")
        points[at] = number(path, line, row, "time_us")
    axes = tuple(tuple(sorted({0, *(at[place] for at in points)})) for place in range(len(GRID)))
    if short := [name for name, axis in zip(GRID, axes, strict=True) if len(axis) < 3]:
        raise CorpusError(f"{path}: {', '.join(short)} has fewer than two points above 0; {MEND}")
    if (cells := math.prod(map(len, axes))) > _MOST_CELLS:
        raise CorpusError(
            f"{path}: its {len(points):,} points lie on no grid, one of {cells:,} would hold them; {MEND}"
        )
    grid = np.full([len(axis) for axis in axes], np.nan)
    for at, microseconds in points.items():
        grid[tuple(axis.index(value) for axis, value in zip(axes, at, strict=True))] = microseconds
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
        for place in (2, 3):
            at, axis = hole[place], axes[place]
            before = [grid[(*hole[:place], at - back, *hole[place + 1 :])] for back in (1, 2)] if at >= 3 else [np.nan]
            if not np.isnan(before).any():
                slope = (before[0] - before[1]) / (axis[at - 1] - axis[at - 2])
                grid[hole] = max(0.0, before[0] + slope * (axis[at] - axis[at - 1]))
                break
        else:
            point = {name: axis[i] for name, axis, i in zip(GRID, axes, hole, strict=True)}
            raise CorpusError(f"{path}: there is no measurement at {point}; {MEND}")


def _between_grids(grid: np.ndarray) -> np.ndarray:
    """Where two coordinates are of different grids, as no measurement has both; [chunks, prefixes, decodes, contexts].

    A published table may be the union of a coarse grid and a finer one. A point that is missing from its own grid is
    none of these: each two of its coordinates stand together somewhere.
    """
    measured, apart = ~np.isnan(grid), np.zeros(grid.shape, bool)
    for kept in combinations(range(grid.ndim), 2):
        others = tuple(place for place in range(grid.ndim) if place not in kept)
        apart |= ~measured.any(others, keepdims=True)
    return apart


def _join(axes: tuple[tuple[int, ...], ...], grid: np.ndarray, wanted: np.ndarray) -> bool:
    """Set ``wanted`` points that have known ones on both sides along an axis to the straight line between the two; of
    several axes to that on which these are nearest to each other, by their ratio. 0 is a point of its own. Returns
    whether any was set."""
    measured, nearest = grid.copy(), np.full(grid.shape, np.inf)
    for place, axis in enumerate(axes):
        at = np.array(axis, dtype=float)
        lines, found, near = (np.moveaxis(one, place, -1) for one in (measured, grid, nearest))
        for line in map(tuple, np.argwhere(np.moveaxis(wanted, place, -1).any(-1))):
            known = np.flatnonzero(~np.isnan(lines[line]) & (at > 0))
            for hole in np.flatnonzero(np.moveaxis(wanted, place, -1)[line]) if len(known) > 1 else ():
                right = int(np.searchsorted(known, hole))
                if not 0 < right < len(known):
                    continue
                low, high = known[right - 1], known[right]
                if (ratio := at[high] / at[low]) < near[line][hole]:
                    near[line][hole] = ratio
                    share = (at[hole] - at[low]) / (at[high] - at[low])
                    found[line][hole] = lines[line][low] * (1 - share) + lines[line][high] * share
    return bool(np.isfinite(nearest).any())
