"""Times that were measured at some sizes, as a line over all of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise


def line_through(points: Mapping[int, float], most: int) -> list[float]:
    """The value at 0 ... ``most`` [most + 1] from ``points``, ascending: straight between them, below the first as
    there, and beyond the last as it went over the upper half, since a table may end on the flat stair of a tile."""
    at, values = list(points), list(points.values())
    line = [values[0]] * min(at[0], most + 1)
    for (start, low), (end, high) in pairwise(points.items()):
        slope = (high - low) / (end - start)
        line += [slope * (here - start) + low for here in range(start, min(end, most + 1))]
    slope = 0.0
    if len(at) > 1:
        middle = max(bisect_right(at, at[-1] / 2) - 1, 0)
        slope = (values[-1] - values[middle]) / (at[-1] - at[middle])
    return line + [values[-1] + slope * beyond for beyond in range(most + 1 - at[-1])]


def follow(line: Sequence[float], count: int) -> float:
    """``line[count]``, its last step going on beyond it."""
    if count < len(line):
        return float(line[count])
    return float(line[-1] + (count - len(line) + 1) * (line[-1] - line[-2]))
