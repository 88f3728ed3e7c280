"""Policies on the same draws, the reader's own first, as one table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from firsttoken.study.progress import track
from firsttoken.study.stats import FEWEST, bootstrap
from firsttoken_studies.record.show import interval

Values = Mapping[str, float]  # of one draw, by what was measured and its unit


@dataclass(frozen=True)
class TrialTable:
    """``rows`` hold, by policy, the values of each draw; the first is the reader's. ``setting`` says on what."""

    setting: str
    rows: Mapping[str, Sequence[Values]]

    def told(self) -> str:
        """The table: a mean with its 95 % interval in each cell, the reader's row marked."""
        names, n = list(self.rows), len(next(iter(self.rows.values())))
        interval_name = "95 % interval" if n >= FEWEST else "range"
        columns = [["", *(f"{'  ' if index else '> '}{name}" for index, name in enumerate(names))]]
        for heading in self.rows[names[0]][0]:
            columns.append([heading, *_cells(heading, [[draw[heading] for draw in self.rows[name]] for name in names])])
        widths = [max(map(len, column)) for column in columns]
        padded = [[cell.ljust(widths[0]) for cell in columns[0]]]
        padded += [
            [cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)
        ]
        lines = map("  ".join, zip(*padded, strict=True))
        return "\n".join(
            [
                textwrap.fill(self.setting, 110),
                f"n = {n} draws, the same for all; mean [{interval_name}]; > is yours",
                "",
                *lines,
            ]
        )


def held(
    own_policy: tuple[str, Any, Callable[[], AbstractContextManager[None]]],
    siblings: Mapping[str, Any],
    run_one: Callable[[Any, int], Values],
    draws: Iterable[int],
) -> dict[str, list[Values]]:
    """Return the values of ``run_one(policy, draw)``, by name: of ``own_policy`` (its name, itself, around all that
    runs it) first, so that its faults show before its siblings have run."""
    name, own_factory, judged = own_policy
    rows: dict[str, list[Values]] = {}
    jobs = {name: own_factory} | {sibling: policy for sibling, policy in siblings.items() if sibling != name}
    with track(desc="policies", total=len(jobs) * len(draws), unit="run") as bar:
        for policy in jobs:
            with judged() if policy == name else nullcontext():
                for draw in draws:
                    bar.set_postfix_str(policy)
                    rows.setdefault(policy, []).append(run_one(jobs[policy], draw))
                    bar.update()
    return rows


def _cells(heading: str, columns: Sequence[Sequence[float]]) -> list[str]:
    """Three digits of the largest value, so that a column's numbers stand below each other.

    Of few draws the interval is Student's, which knows no limits: it ends at 0 where no draw is below 0, as times and
    counts never are, and at 100 where ``heading`` is of percent.
    """
    values = [value for column in columns for value in column]
    lowest, highest = (0.0 if min(values) >= 0 else -math.inf), (100.0 if heading.endswith("%") else math.inf)
    largest = max(map(abs, values))
    digits = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
    cells = []
    for column in columns:
        entry = bootstrap(column).summary()
        low, high = max(entry["low"], lowest), min(entry["high"], highest)
        number = f"{entry['value']:.{digits}f}"
        cells.append(interval(entry | {"low": low, "high": high}, digits) if low < high else number)
    return cells
