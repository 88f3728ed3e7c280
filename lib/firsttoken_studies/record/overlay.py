"""The reader's own run drawn over the record: own points filled and dark, those of the record pale behind them.

Where the reader has changed a mechanism, a third run stands beside the two: the same study with that mechanism, ringed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from firsttoken.study.machine import machine_slug
from firsttoken_studies.record.plot import LOOKS, Axes, Figure
from firsttoken_studies.record.results import Result

if TYPE_CHECKING:
    from matplotlib.legend import Legend

PALE = 0.4  # opacity of the record
SHIFT = {
    1: 0.0,
    2: 0.32,
    3: 0.26,
}  # from one result's points to the next one's, by their number; categories are 1 apart


@dataclass(frozen=True)
class DrawnResult:
    """One result in a figure, the ``index``-th of ``count``: the reader's ``own`` run, or the record.

    ``library`` is set for an own run with a mechanism that the reader has changed: the run of the library's beside it.
    ``points`` are those of all results of the figure: what the changed mechanism leaves as it was is drawn once.
    """

    result: Result
    own: bool
    index: int = 0
    count: int = 1
    library: Result | None = None
    points: set[Any] = field(default_factory=set, compare=False)

    @property
    def alone(self) -> bool:
        """Return whether there is no other result in the figure."""
        return self.count == 1

    @property
    def style(self) -> dict[str, Any]:
        """Return matplotlib's options for the lines, bars and points of this result."""
        style = {"alpha": 1.0, "zorder": 4} if self.own else {"alpha": 1.0 if self.alone else PALE, "zorder": 2}
        return style | ({"path_effects": _ring(), "zorder": 5} if self.library else {})

    @property
    def outlined(self) -> dict[str, Any]:
        """``style``, and a black edge round the markers of an own run that lies over the record."""
        return self.style | ({"markeredgecolor": "black"} if self.own and not self.alone else {})

    @property
    def shift(self) -> float:
        """Return the distance of this result's point from the place of its category."""
        return (self.index - (self.count - 1) / 2) * SHIFT[self.count]

    def who(self, n: int | None = None) -> str:
        """This result in a legend: whose it is, and of how many observations."""
        live = self.own and self.result.slug == machine_slug()  # a record alone may be of a machine with a GPU
        named = "your mechanism" if self.library else "your run" if live else f"recorded on {self.result.slug}"
        return named if n is None else f"{named}, n = {n}"

    def point(
        self,
        axes: Axes,
        position: float,
        entry: Mapping[str, Any] | None,
        name: str,
        *,
        along: Literal["x", "y"] = "y",
        scale: float = 1.0,
        label: str | None = None,
        share: float = 1.0,
    ) -> None:
        """Draw a value of the summary with its interval at ``position`` of the other axis, in the look of ``name``.

        Nothing is drawn for None: the run has not measured it. The value, times ``scale``, lies ``along`` this axis.
        ``position`` holds this ``share`` of ``shift``.
        """
        if entry is None or self._repeated(axes, position - share * self.shift, entry):
            return
        value = scale * entry["value"]
        low, high = (scale * entry.get(end, entry["value"]) for end in ("low", "high"))
        error = [[max(0.0, value - low)], [max(0.0, high - value)]]
        coordinates = (position, value) if along == "y" else (value, position)
        axes.errorbar(*coordinates, **{f"{along}err": error}, **self._look(name), label=label, linestyle="none")

    def bar(
        self,
        axes: Axes,
        position: float,
        entry: Mapping[str, Any] | None,
        name: str,
        *,
        width: float,
        scale: float = 1.0,
    ) -> None:
        """Draw a value of the summary, times ``scale``, as a bar with its interval: the record's beside the own one.

        ``width`` is that of the place of a category, which all results share. Nothing is drawn for None.
        """
        if entry is None or self._repeated(axes, position, entry):
            return
        value = scale * entry["value"]
        offset = position + (self.index - (self.count - 1) / 2) * width / self.count
        low, high = (scale * entry.get(end, entry["value"]) for end in ("low", "high"))
        edge = {"edgecolor": "black", "linewidth": 1.2} if self.own else {"linewidth": 0}
        axes.bar(offset, value, width / self.count, color=LOOKS[name].colour, **edge, **self.style)
        if high > low:
            error = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar(offset, value, yerr=error, color=LOOKS["mark"].colour, linestyle="none", zorder=5)

    def line(
        self,
        axes: Axes,
        places: Sequence[float],
        entries: Sequence[Mapping[str, Any] | None],
        name: str,
        **options: Any,
    ) -> None:
        """Draw values of the summary as a line over ``places`` with a band of their intervals; what was not measured
        (None) is left out. ``scale`` multiplies the values; other ``options`` go to ``Axes.plot``."""
        scale = options.pop("scale", 1.0)
        measured = [(position, entry) for position, entry in zip(places, entries, strict=True) if entry is not None]
        if all([self._repeated(axes, position, entry) for position, entry in measured]):
            return
        positions, values = [position for position, _ in measured], [scale * entry["value"] for _, entry in measured]
        bounds = [[scale * entry.get(end, entry["value"]) for _, entry in measured] for end in ("low", "high")]
        axes.plot(positions, values, **(self._look(name) | options))
        axes.fill_between(
            positions, *bounds, color=LOOKS[name].colour, alpha=0.15 if self.own else 0.07, linewidth=0, zorder=1
        )

    def _repeated(self, axes: Axes, category: float, entry: Mapping[str, Any]) -> bool:
        """Return whether the changed mechanism has the very value that the library's has at this ``category``."""
        return self.repeats(axes, category, tuple(entry.get(end) for end in ("value", "low", "high")))

    def repeats(self, axes: Axes, category: float | str, value: Hashable) -> bool:
        """Return whether this is the changed mechanism's run, and the library's has this very ``value`` there.

        For what a figure draws by itself; ``point``, ``bar`` and ``line`` ask it.
        """
        point = (axes, round(category, 6) if isinstance(category, float) else category, value)
        if self.own and self.library is None:
            self.points.add(point)
        return self.library is not None and point in self.points

    def _look(self, name: str) -> dict[str, Any]:
        look = LOOKS[name]
        edge = {"markeredgecolor": "black", "markeredgewidth": 0.8} if self.own and look.marker else {}
        return {"color": look.colour, "marker": look.marker or None} | edge | self.style


def _ring() -> list[Any]:
    """Return matplotlib's effect that rings a line, bar or marker of the reader's mechanism."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=5, foreground=LOOKS["your mechanism"].colour)]


def over(recorded: Result | None, now: Result | None) -> list[DrawnResult]:
    """The results that a figure draws, the record first: the reader's run stands over it, and before both the run of a
    mechanism that the reader has changed. The own run is alone where there is no record, or where it is the record; the
    record is alone where nobody ran it."""
    results: list[tuple[Result, bool, Result | None]] = []
    if recorded is not None and (now is None or (recorded.path, recorded.started) != (now.path, now.started)):
        results.append((recorded, False, None))
    if now is not None:
        results.append((now, True, None))
        if now.with_mechanism is not None:
            results.append((now.with_mechanism, True, now))
    count, points = len(results), set()
    return [
        DrawnResult(result, is_own, index, count, library, points)
        for index, (result, is_own, library) in enumerate(results)
    ]


def counted(shown: Sequence[DrawnResult], measure: str, **labels: Any) -> str:
    """Return the numbers of observations of this value of the summary, by result, for a figure whose panels have
    different ones."""
    entries = [(result, result.result.summary.get(measure, **labels)) for result in shown]
    counts = [
        f"{'yours ' if result.own and not result.alone else ''}{entry['n']}" for result, entry in entries if entry
    ]
    return f"n = {', '.join(counts)}"


def name_results(
    figure: Figure, shown: Sequence[DrawnResult], measure: str | None = None, legend: Legend | None = None
) -> None:
    """Name below ``figure`` the source of its points: machine, profile, and the number of observations of ``measure``.

    Where the figure has a ``legend`` outside its axes, which would lie over the sentence, the sentence is the legend's
    title.
    """
    lines = []
    for result_drawn in shown:
        counts = {entry["n"] for entry in result_drawn.result.summary if entry["measure"] == measure and "n" in entry}
        n = f", n = {min(counts)}" + (f" to {max(counts)}" if len(counts) > 1 else "") if counts else ""
        mark = "ringed" if result_drawn.library else "dark, with a black edge" if result_drawn.own else "pale"
        lines.append(
            f"{'' if result_drawn.alone else mark + ': '}{result_drawn.who()} "
            f"(profile {result_drawn.result.profile}{n})"
        )
    caption = ("   " if len(lines) < 3 else "\n").join(lines)
    if legend is not None:
        legend.set_title(caption, {"size": "small"})
    else:
        figure.supxlabel(caption, fontsize="small", color=LOOKS["mark"].colour)


def legend(
    figure: Figure,
    axes: Axes,
    shown: Sequence[DrawnResult],
    measure: str | None = None,
    *,
    columns: int = 3,
    size: float | str = 9,
) -> None:
    """The legend of ``axes`` below ``figure``, and under one heading with it what ``name_results`` says."""
    entries = axes.get_legend_handles_labels()
    below = figure.legend(*entries, loc="outside lower center", ncols=columns, fontsize=size)
    name_results(figure, shown, measure, below)
