"""How schedulers and cards are named and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from firsttoken.simulation.hardware import Hardware
from firsttoken_studies.record.overlay import DrawnResult, over
from firsttoken_studies.record.plot import LOOKS
from firsttoken_studies.record.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NAMES = {
    "prefill_first": ("prefill first", "prefill first (vLLM 0.2)"),
    "hybrid_only": ("hybrid batches", "whole prompts beside decodes"),
    "iteration_level": ("other", "whole prompts, blocks reserved (Orca)"),
    "chunked_only": ("chunks alone", "chunks in turns with decodes"),
    "sarathi": ("sarathi", "Sarathi"),
    "prefill_cap": ("other", "two budgets (P-PAS)"),
    "deadline": ("other", "deadlines (Niyama)"),
    "shortest_first": ("short first", "short prompts first"),
    "adaptive_budget": ("measured", "adaptive budget"),
}


def told(scheduler: str) -> str:
    """A scheduler as a reader knows it: "sarathi 512" is "Sarathi, 512"."""
    name, _, budget = scheduler.partition(" ")
    return NAMES[name][1] + (f", {budget}" if budget else "")


def look_of(scheduler: str) -> str:
    """Under which name of ``plot.LOOKS`` a scheduler is drawn."""
    return NAMES[scheduler.partition(" ")[0]][0]


def name_schedulers(axes: Axes, schedulers: Sequence[str]) -> None:
    """Make the legend of ``axes`` name the marks of ``schedulers``."""
    for name in schedulers:
        look = LOOKS[look_of(name)]
        axes.plot([], [], linestyle="none", marker=look.marker, color=look.colour, label=told(name))


def scaled(entry: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """An entry of a summary in another unit."""
    return entry | {name: scale * entry[name] for name in ("value", "low", "high") if name in entry}


def apart(recorded: Result | None, now: Result, heading: Callable[[Result], str]) -> dict[str, list[DrawnResult]]:
    """Return the results that may stand in one panel, by its heading: ``heading`` says where one was measured.

    A reader's run of another card, model or size than the record's has a panel of its own.
    """
    if recorded is None or heading(recorded) == heading(now):
        return {heading(now): over(recorded, now)}
    return {heading(recorded): [DrawnResult(recorded, own=False, count=2)], heading(now): over(None, now)}


def card(result: Result) -> str:
    """Return the card and model on which ``result`` was simulated."""
    return Hardware(**result.parameters["hardware"]).description
