"""Times that were measured at some sizes, as a line over all of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np


def line_through(points: Mapping[int, float], most: int) -> np.ndarray:
    """The value at 0 ... ``most`` [most + 1] from ``points``, ascending: straight between them, below the first as
    there, and beyond the last as it went over the upper half, since a table may end on the flat stair of a tile."""
    at, values = list(points), list(points.values())
    line = np.interp(np.arange(most + 1), at, values)
    if len(at) > 1 and at[-1] < most:
        middle = max(bisect_right(at, at[-1] / 2) - 1, 0)
        slope = (values[-1] - values[middle]) / (at[-1] - at[middle])
        line[at[-1] :] = values[-1] + slope * np.arange(most + 1 - at[-1])
    return line


def follow(line: Sequence[float] | np.ndarray, count: int) -> float:
    """``line[count]``, its last step going on beyond it."""
    if count < len(line):
        return float(line[count])
    return float(line[-1] + (count - len(line) + 1) * (line[-1] - line[-2]))
