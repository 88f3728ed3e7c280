"""Capacity by scheduler on GPUs that are not here, by measured operators: the paper's set-ups, and six cards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from firsttoken.assets.dense_shape import DenseShape, dense_shape
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.sarathi.capacity import Objective
from firsttoken.sarathi.policy import Policy, scheduler_labels
from firsttoken.simulation.costs.operator_tables import OperatorTables, tables_from
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import KIND
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import COLOURS, log_ticks, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, distinct, frame_of
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.leaderboard import BASE, add_capacities
from firsttoken_studies.sarathi.styles import look_of, name_schedulers, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECODES, CONTEXT = 32, 1024  # of the decode iteration that a result states beside its objective
PAPER_BAR = {"color": COLOURS["paper"], "lw": 6, "alpha": 0.5}
_FIRST_RATE = 2.0  # requests/s at which each search begins
PAPER_X = {"mistral-7b on 1 a100-sxm, 100 ms": 2.6, "yi-34b on 2 a100-sxm, 200 ms": 3.7}  # abstract
BARE, PAPER_STACK = "bare", "sarathi-2024"
PAPER_X |= {f"{case}, {PAPER_STACK}": times for case, times in PAPER_X.items()}


@dataclass(frozen=True)
class CardCapacityConfig:
    """``cases`` of "MODEL GPUS CARD MS" or "MODEL GPUS CARD MS STACK": a model split over so many GPUs of a card, the
    most that the P99 of the time between tokens may be, and the server around the card, if not the card alone. Each
    scheduler's search is made for ``seeds`` draws of ``requests``, at most ``batch`` at once, with the lengths of
    ``lengths``.
    """

    cases: tuple[str, ...]
    schedulers: tuple[str, ...]
    lengths: str
    requests: int
    seeds: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.requests, self.seeds, self.batch) < 1:
            raise ProfileError("card_capacity: requests, seeds and batch must be at least 1")
        if twice := next((case for case in self.cases if self.cases.count(case) > 1), None):
            raise ProfileError(f"card_capacity: the case {twice!r} is there twice; name each once")


@dataclass(frozen=True)
class CardCase:
    """One case: its hardware, and the bound on the time between tokens in ms."""

    hardware: Hardware
    tbt_ms: int
    stack: str = BARE

    @classmethod
    def named(cls, text: str) -> CardCase:
        """Raises ProfileError for a text that is no case, and what the hardware raises."""
        try:
            model, gpus, card, tbt_ms, *stack = text.split()
            count, bound = int(gpus), int(tbt_ms)
        except ValueError:
            raise ProfileError(f"card_capacity: {text!r} is no case; write MODEL GPUS CARD MS") from None
        return cls(Hardware(card, DECODES, CONTEXT, model=model, gpus=count), bound, " ".join(stack) or BARE)

    def __str__(self) -> str:
        stack = "" if self.stack == BARE else f", {self.stack}"
        return f"{self.hardware.model} on {self.hardware.gpus} {self.hardware.costs}, {self.tbt_ms} ms{stack}"


def schematic() -> Schematic:
    """Draw how the time of a step is the sum of operators that were measured alone."""
    alt = (
        "A step of an engine is a sequence of operators: the products before attention, attention, the product behind "
        "it, those of the rest of the layer, an all-reduce, and small kernels. Each was measured alone on the card, "
        "for many sizes. Their times, one after the other and times the number of layers, are the time of the step."
    )
    sketch = Schematic(20, 5.4, alt)
    sketch.text(0.2, 0.4, "The time of a step is the sum of operators that were measured one by one", heading=True)
    edge = 0.4
    for name, look, width in (
        ("product", "measured", 2.6),
        ("attention", "prefill", 3.6),
        ("product", "measured", 2.2),
        ("products", "measured", 4.4),
        ("all-reduce", "swap", 2.5),
        ("small", "other", 1.6),
    ):
        sketch.box(edge, 1.4, name, look, width=width)
        edge += width
    sketch.arrow((0.4, 2.9), (edge, 2.9))
    sketch.text(edge + 0.2, 2.9, "x layers")
    sketch.text(0.4, 3.7, "One layer: each time is read from a table of this card, at the size of the batch")
    sketch.text(0.4, 4.6, "No model computes, and no number is fitted to a server's run")
    return sketch


StepSum: TypeAlias = Callable[[OperatorTables, DenseShape, int, Sequence[tuple[int, int]], Sequence[int]], float]
"""A function of (tables, shape, gpus, prefills, contexts) that adds up the seconds of a step."""


class AddedCosts(Costs):
    """The costs of a card, with the seconds of a step as ``add`` has them.

    Each curve of the tables is made once: a sum asks for the same ones at every step (0.58 ms, and 0.09 ms so).
    """

    def __init__(self, hardware: Hardware, costs: Costs, add: StepSum) -> None:
        tables = copy.copy(OperatorTables.read(hardware.costs))
        for name in ("product", "attention", "all_reduce"):
            object.__setattr__(tables, name, cache(getattr(tables, name)))
        self._library, self._add = costs, partial(add, tables, dense_shape(hardware.model), hardware.gpus)

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        return self._add(prefills, contexts)

    def swap_out_s(self, tokens: int) -> float:
        return self._library.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        return self._library.swap_in_s(tokens)


def card_capacity(profile: Profile, *, step_s: StepSum | None = None) -> Outcome:
    """Rows {case, model, gpus, card, tbt_s, seed, scheduler, requests_per_s, trials, blocks, ...}.

    ``step_s`` is a reader's sum of the operators of a step; None takes the library's.
    """
    return _searched(profile.section("card_capacity", CardCapacityConfig), profile.seed, step_s)


def paper_capacity(profile: Profile, *, step_s: StepSum | None = None) -> Outcome:
    """Rows as those of :func:`card_capacity`, with the paper's own lengths, number of requests and server."""
    return _searched(profile.section("paper_capacity", CardCapacityConfig), profile.seed, step_s)


def _searched(config: CardCapacityConfig, first_seed: int, step_s: StepSum | None) -> Outcome:
    rows: Rows = []
    runs = [
        (CardCase.named(text), seed, scheduler)
        for text in config.cases
        for seed in range(first_seed, first_seed + config.seeds)
        for scheduler in config.schedulers
    ]
    for case, seed, scheduler in track(runs, desc="capacity by card"):
        hardware = case.hardware
        bench = bench_of(hardware, config.lengths, config.requests, config.batch, _FIRST_RATE, step_s, case.stack)
        searched = bench.search(Policy.named(scheduler), Objective(case.tbt_ms / 1e3), seed)
        labels = {"case": str(case), "model": hardware.model, "gpus": hardware.gpus, "card": hardware.costs}
        labels |= {
            "blocks": hardware.blocks,
            "beyond": hardware.provenance(bench.costs)["beyond"],
            "iteration_s": bench.iteration_s,
            "tbt_s": case.tbt_ms / 1e3,
        }
        rows.append(labels | {"seed": seed, "scheduler": scheduler} | searched)
    return Outcome(rows, provenance={"kind": KIND, "costs": tables_from()})


def bench_of(
    hardware: Hardware,
    lengths: str,
    requests: int,
    batch: int,
    start: float,
    step_s: StepSum | None = None,
    stack: str = BARE,
) -> Bench:
    """A card with draws of ``requests`` of ``lengths``, at most ``batch`` at once; a search begins at ``start``
    requests a second. Requests may be longer than the model's context, as the paper's are. A step takes what a reader's
    ``step_s`` adds up, where there is one."""
    bench = Bench(
        CapacityConfig(lengths, requests, 1, batch, start, (), (), (), 1.0, stack=stack), hardware, extended=True
    )
    if step_s is not None:
        bench.costs = bench.stack.around(AddedCosts(hardware, bench.costs, step_s), hardware.gpus)
    return bench


def card_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Capacity by case and scheduler, and over that of the prefill-first scheduler on the same draws."""
    summary = Summary()
    for case, case_rows in frame_of(rows).groupby("case", sort=False):
        add_capacities(summary, case_rows, case=case)
    return summary


def capacities_by_card(recorded: Result | None, now: Result) -> Figure:
    """Requests a second by case and scheduler, with the interval over draws; the paper's factor where it has one."""
    results = over(recorded, now)
    rows = [row for shown in results for row in shown.result.rows]
    cases = distinct(rows, "case")
    fig, ax = panels(figsize=(9, 0.5 * len(cases) + 2.2))
    for shown in results:
        for (case_index, case), name in product(enumerate(cases), distinct(shown.result.rows, "scheduler")):
            entry = shown.result.summary.get("capacity_requests_per_s", **scheduler_labels(name), case=case)
            shown.point(ax, case_index + shown.shift, entry, look_of(name), along="x")
    base = (recorded or now).summary
    for case_index, case in enumerate(cases):
        entry = base.get("capacity_requests_per_s", scheduler=BASE, case=case)
        if case in PAPER_X and entry and entry["value"] > 0:
            ax.plot([PAPER_X[case] * entry["value"]] * 2, [case_index - 0.35, case_index + 0.35], **PAPER_BAR)
    name_schedulers(ax, distinct(rows, "scheduler"))
    ax.plot([], [], **PAPER_BAR, label="the paper's factor over prefill first")
    ax.set_yticks(range(len(cases)), cases)
    ax.set(
        xscale="log",
        ylim=(len(cases) - 0.4, -0.6),
        xlabel="requests a second with the P99 between tokens within the bound (simulated)",
    )
    log_ticks(ax.xaxis)
    fig.suptitle(_message(base))
    legend(fig, ax, results, "capacity_requests_per_s", size="small")
    return fig


def _message(summary: Summary) -> str:
    ratios = [entry["value"] for entry in summary.all("capacity_x", scheduler="sarathi", than=BASE)]
    if not ratios:
        return "Capacity by card and scheduler"
    return f"By card and model chunks serve {min(ratios):.1f} to {max(ratios):.1f} times the load of prefill first"


def capacity_rows(result: Result) -> Table:
    """A line a case: the capacity of each scheduler, and Sarathi's over that of prefill first."""
    for case in distinct(result.rows, "case"):
        line: dict[str, Any] = {"case": case}
        for name in distinct(result.rows, "scheduler"):
            entry = result.summary.get("capacity_requests_per_s", **scheduler_labels(name), case=case)
            line[f"{told(name)}, requests/s"] = interval(entry, 2)
            if name != BASE:
                ratio = result.summary.get("capacity_x", **scheduler_labels(name), case=case, than=BASE)
                line[f"{told(name)} over prefill first"] = interval(ratio, 2)
        yield line
