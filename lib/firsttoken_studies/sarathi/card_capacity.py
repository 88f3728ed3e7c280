"""Capacity by scheduler on GPUs that are not here, by measured operators: the paper's set-ups, and six cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from firsttoken.engine.costs.operator_tables import tables_from
from firsttoken.sarathi.capacity import Objective
from firsttoken.sarathi.hardware import Hardware
from firsttoken.sarathi.policy import Policy
from firsttoken.sarathi.policy_text import place_of
from firsttoken.study.errors import ProfileError
from firsttoken.study.overlay import name_results, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.sarathi.bench import Bench, CapacityConfig
from firsttoken_studies.sarathi.figures import NAMES, told
from firsttoken_studies.sarathi.leaderboard import BASE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECODES, CONTEXT = 32, 1024  # of the decode iteration that a result states beside its objective
PAPER_X = {"mistral-7b on 1 a100-sxm, 100 ms": 2.6, "yi-34b on 2 a100-sxm, 200 ms": 3.7}  # abstract


@dataclass(frozen=True)
class CardCapacityConfig:
    """``cases`` of "MODEL GPUS CARD MS": a model split over so many GPUs of a card, and the most that the P99 of the
    time between tokens may be. Each scheduler's search is made for ``seeds`` draws of ``requests``, at most ``batch``
    at once, with the lengths of ``lengths``.
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

    @classmethod
    def named(cls, text: str) -> CardCase:
        """Raises ProfileError for a text that is no case, and what the hardware raises."""
        try:
            model, gpus, card, tbt_ms = text.split()
            count, bound = int(gpus), int(tbt_ms)
        except ValueError:
            raise ProfileError(f"card_capacity: {text!r} is no case; write MODEL GPUS CARD MS") from None
        return cls(Hardware(card, DECODES, CONTEXT, model=model, gpus=count), bound)

    def __str__(self) -> str:
        return f"{self.hardware.model} on {self.hardware.gpus} {self.hardware.costs}, {self.tbt_ms} ms"


def card_capacity(profile: Profile) -> Outcome:
    """Rows {case, model, gpus, card, tbt_s, seed, scheduler, requests_per_s, trials, blocks, ...}."""
    config = profile.section("card_capacity", CardCapacityConfig)
    found: Rows = []
    runs = [
        (CardCase.named(text), seed, scheduler)
        for text in config.cases
        for seed in range(profile.seed, profile.seed + config.seeds)
        for scheduler in config.schedulers
    ]
    for case, seed, scheduler in tqdm(runs, desc="card_capacity", disable=None):
        hardware = case.hardware
        bench = Bench(_as_bench(config), hardware)
        searched = bench.search(Policy.named(scheduler), Objective(case.tbt_ms / 1e3), seed)
        where = {"case": str(case), "model": hardware.model, "gpus": hardware.gpus, "card": hardware.costs}
        where |= {
            "blocks": hardware.blocks,
            "beyond": hardware.provenance(bench.costs)["beyond"],
            "iteration_s": bench.iteration_s,
            "tbt_s": case.tbt_ms / 1e3,
        }
        found.append(where | {"seed": seed, "scheduler": scheduler} | searched)
    return Outcome(found, provenance={"kind": "simulated on measured operators", "costs": tables_from()})


def _as_bench(config: CardCapacityConfig) -> CapacityConfig:
    return CapacityConfig(
        config.lengths, config.requests, config.seeds, config.batch, 2.0, config.schedulers, (), (), 1.0
    )


def card_summary(found: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Capacity by case and scheduler, and over that of the prefill-first scheduler on the same draws."""
    summary = Summary()
    for case in _values(found, "case"):
        here = [row for row in found if row["case"] == case]
        rates = {name: [row["requests_per_s"] for row in here if row["scheduler"] == name] for name in _names(here)}
        for name, mine in rates.items():
            where = place_of(name) | {"case": case}
            summary.add("capacity_requests_per_s", bootstrap(mine).summary("requests/s"), **where)
            if BASE in rates and name != BASE and min(rates[BASE]) > 0:
                pairs = np.column_stack([mine, rates[BASE]])
                ratio = bootstrap(pairs, lambda sample: float(np.divide(*sample.mean(0))))
                summary.add("capacity_x", ratio.summary("x"), **where, than=BASE)
    return summary


def capacities_by_card(recorded: Result | None, now: Result) -> Figure:
    """Requests a second by case and scheduler, with the interval over draws; the paper's factor where it has one."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    drawn = over(recorded, now)
    cases = list(dict.fromkeys(case for one in drawn for case in _values(one.result.rows, "case")))
    fig, ax = plt.subplots(figsize=(9, 0.5 * len(cases) + 2.2))
    for one in drawn:
        for place, case in enumerate(cases):
            for name in _names(one.result.rows):
                entry = one.result.summary.get("capacity_requests_per_s", **place_of(name), case=case)
                one.point(ax, place + one.shift, entry, NAMES[name.partition(" ")[0]][0], along="x")
    base = (recorded or now).summary
    for place, case in enumerate(cases):
        entry = base.get("capacity_requests_per_s", scheduler=BASE, case=case)
        if case in PAPER_X and entry and entry["value"] > 0:
            ax.plot(
                [PAPER_X[case] * entry["value"]] * 2,
                [place - 0.35, place + 0.35],
                color=COLOURS["paper"],
                lw=6,
                alpha=0.5,
            )
    for name in dict.fromkeys(name for one in drawn for name in _names(one.result.rows)):
        look = LOOKS[NAMES[name.partition(" ")[0]][0]]
        ax.plot([], [], linestyle="none", marker=look.marker, color=look.colour, label=told(name))
    ax.plot([], [], color=COLOURS["paper"], lw=6, alpha=0.5, label="the paper's factor over prefill first")
    ax.set_yticks(range(len(cases)), cases)
    ax.set(
        xscale="log",
        ylim=(len(cases) - 0.4, -0.6),
        xlabel="requests a second with the P99 between tokens within the bound (simulated)",
    )
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    fig.suptitle(_message(base))
    names = fig.legend(loc="outside lower center", ncols=3, fontsize="small")
    name_results(fig, drawn, "capacity_requests_per_s", legend=names)
    return fig


def _message(summary: Summary) -> str:
    ratios = [entry["value"] for entry in summary.all("capacity_x", scheduler="sarathi", than=BASE)]
    if not ratios:
        return "Capacity by card and scheduler"
    return f"By card and model chunks serve {min(ratios):.1f} to {max(ratios):.1f} times the load of prefill first"


def capacity_rows(result: Result) -> Rows:
    """A line a case: the capacity of each scheduler, and Sarathi's over that of prefill first."""
    lines: Rows = []
    for case in _values(result.rows, "case"):
        line: dict[str, Any] = {"case": case}
        for name in _names(result.rows):
            entry = result.summary.get("capacity_requests_per_s", **place_of(name), case=case)
            line[f"{told(name)}, requests/s"] = interval(entry, 2)
            if name != BASE:
                ratio = result.summary.get("capacity_x", **place_of(name), case=case, than=BASE)
                line[f"{told(name)} over prefill first"] = interval(ratio, 2)
        lines.append(line)
    return lines


def _names(found: Rows) -> list[str]:
    return list(dict.fromkeys(row["scheduler"] for row in found))


def _values(found: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in found))
